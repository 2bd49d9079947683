"""Means with their standard errors, and pass@k. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """A mean and its standard error; the error of a single value is 0."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Rate":
        """Return the mean of values and the standard error from their sample deviation."""
        count = len(values)
        mean = sum(values) / count
        if count < 2:
            return cls(mean, 0.0)
        squares = sum((value - mean) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (count - 1) / count))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `samples` >= k programs, of which `right` pass.

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021: 1 - C(n - c, k) / C(n, k).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
