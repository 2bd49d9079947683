"""Cuts token sequences into windows of the model's length that score each token exactly once. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """Tokens that one forward pass scores.

    inputs: the ids that the model reads, [n]. targets: the ids that the last m of them predict, [m]. counted: bool [m],
    the targets that count; None: all of them.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    counted: NDArray[np.bool_] | None = None


def rolling_windows(
    ids: NDArray[Any],
    *,
    length: int,
    stride: int,
    prefix: int | None,
    counted: NDArray[np.bool_] | None = None,
) -> Iterator[Window]:
    """Yield windows of at most `length` inputs that together score each token of `ids` [n] once.

    The first window scores `length` tokens, each later one the next `stride` tokens after length - stride tokens of
    context; the last window has full context too. So does lm_eval, whose context_len is length - stride + 1.
    prefix: the token before the first one; None: the first token is only context, and is not scored.
    counted: bool [n], the tokens that count; windows without one are left out.
    """
    if prefix is None:
        prefix, ids = int(ids[0]) if len(ids) else 0, ids[1:]
        counted = None if counted is None else counted[1:]
    done = 0
    while done < len(ids):
        end = min(len(ids), done + (stride if done else length))
        start = max(0, end - length)
        inputs = ids[start - 1 : end - 1] if start else np.concatenate([[prefix], ids[: end - 1]])
        within = None if counted is None else counted[done:end]
        if within is None or within.any():
            yield Window(inputs, ids[done:end], within)
        done = end
