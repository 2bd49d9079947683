"""From logits to the next token: pure functions of the logits, the settings and one random number."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.ops.counter import philox
from megalite.parallel.random import key_of


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 takes the likeliest. top_k: from the k likeliest only; 0: all. top_p: from the fewest that
    together have at least this probability (Holtzman et al. 2020, "nucleus sampling"). seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


def next_token(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position` from the logits [V] before it; the same on every rank that has the same logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    cumulated = probabilities(logits, sampling).cumsum(0)
    drawn = uniform(sampling.seed, position) * cumulated[-1]
    return int(torch.searchsorted(cumulated, drawn, right=True).clamp(max=len(cumulated) - 1))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[V] -> [V] in float64: temperature, then top-k, then top-p; those left out have 0."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    chances = scaled.softmax(0)
    if sampling.top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        # Those that the more likely ones alone do not suffice for; the first always stays.
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        beyond[0] = False
        chances = chances.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), 0)
    return chances / chances.sum()


def uniform(seed: int, position: int) -> Tensor:
    """A number in [0, 1) that depends on the seed and the position only."""
    words = philox(
        (torch.tensor(position), torch.tensor(0), torch.tensor(0), torch.tensor(0)), key_of(seed, "generate")
    )
    return words[0].double() * 2.0**-32
