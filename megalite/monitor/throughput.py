"""Tokens per second, model FLOP/s utilisation (MFU), and the speed of a CPU's matrix products."""

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PRODUCT_SIZE, _PRODUCTS, _PRODUCTS_SECONDS = 1024, 10, 0.5


def gemm_flops_per_second(dtype: "torch.dtype") -> float:
    """Measure the best FLOP/s of a few products of 1024^3 in `dtype` on the CPU, with this process's torch threads.

    Takes about half a second. To find what all processes of a machine reach together, let all measure at once.
    """
    import torch

    left = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype)
    out = torch.empty_like(left)
    best, began = float("inf"), time.perf_counter()
    for _ in range(_PRODUCTS):
        started = time.perf_counter()
        torch.mm(left, left, out=out)
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended - began > _PRODUCTS_SECONDS:
            break
    return 2 * _PRODUCT_SIZE**3 / best


@dataclass(frozen=True)
class Speed:
    """tokens_per_second of all ranks; mfu: share of the peak FLOP/s, None if the peak is unknown or was exceeded."""

    tokens_per_second: float
    mfu: float | None


class Throughput:
    """The mean speed over the last `window` steps, without the warm-up step of a process once a second step ran."""

    def __init__(self, *, peak_flops_per_second: float | None, window: int = 20):
        """peak_flops_per_second: of all ranks together; None: unknown."""
        self._peak = peak_flops_per_second
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=window)
        self._warm = False

    def update(self, tokens: int, flops: int, seconds: float) -> Speed:
        """Add a step with the tokens and operations of all ranks and its duration, and return the new speed."""
        if len(self._steps) == 1 and not self._warm:
            self._steps.clear()
            self._warm = True
        self._steps.append((tokens, flops, seconds))
        tokens, flops, seconds = (sum(column) for column in zip(*self._steps, strict=True))
        share = flops / seconds / self._peak if self._peak else None
        if share is not None and share > 1:
            # The peak was measured while other work kept the machine busy: no share of it means anything.
            self._peak = share = None
        return Speed(tokens / seconds, share)
