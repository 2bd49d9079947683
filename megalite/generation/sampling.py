"""Sample the next token from logits: pure functions of the logits, the settings and a counter-based random number."""

import torch
from torch import Tensor

from megalite.generation.request import Sampling
from megalite.ops.counter import philox
from megalite.parallel.random import key_of


def next_token(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Return the token at `position`, sampled from the logits [V]; the same on all ranks with the same logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    cumulated = probabilities(logits, sampling).cumsum(0)
    drawn = uniform(sampling.seed, position) * cumulated[-1]
    return int(torch.searchsorted(cumulated, drawn, right=True).clamp(max=len(cumulated) - 1))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return float64 probabilities [V] for logits [V], after temperature, top-k and top-p; excluded tokens have 0."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    chances = scaled.softmax(0)
    if sampling.top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        # Exclude a token if the more likely ones already reach top_p; the most likely token always stays.
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        beyond[0] = False
        chances = chances.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), 0)
    return chances / chances.sum()


def uniform(seed: int, position: int) -> Tensor:
    """Return a random number in [0, 1) that depends only on seed and position."""
    words = philox(
        (torch.tensor(position), torch.tensor(0), torch.tensor(0), torch.tensor(0)), key_of(seed, "generate")
    )
    return words[0].double() * 2.0**-32
