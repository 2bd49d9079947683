"""The settings of a generation request and the rules over them. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megalite.errors import Problem


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    temperature: 0 is greedy. top_k: sample from the k most likely tokens; 0: all. top_p: sample from the fewest tokens
    whose total probability is at least top_p (nucleus sampling, Holtzman et al. 2020). seed: random seed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


def sampling_problems(
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    name: Callable[[str], str] = str,
) -> Iterator[Problem]:
    """Yield the problems of a request; name: how the caller writes a setting, such as `--top-k` for top_k."""
    if tokens < 1:
        yield Problem(name("tokens"), f"{tokens} is no number of new tokens", "use 1 or more")
    if not 0 <= temperature < float("inf"):
        yield Problem(name("temperature"), f"{temperature:g} is not a temperature", "use 0 or more")
    if top_k is not None and top_k < 1:
        yield Problem(name("top_k"), f"{top_k} is no number of tokens", "use 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        yield Problem(name("top_p"), f"{top_p:g} is not a probability", "use more than 0 and at most 1")
    for setting, given in (("top_k", top_k), ("top_p", top_p)):
        if temperature == 0 and given is not None:
            yield Problem(
                name(setting),
                f"has no effect with {name('temperature')} 0, which takes the most likely token",
                f"set {name('temperature')} above 0, for example 1",
            )
