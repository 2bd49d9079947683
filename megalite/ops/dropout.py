"""Dropout by a given mask (Srivastava et al., "Dropout", 2014)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.ops.counter import MASK_LEVELS, keep_probabilities


class Mask(NamedTuple):
    """A materialised dropout mask. keep: bool, of the shape of the values; scale: 1 / P(keep)."""

    keep: Tensor
    scale: float


class CountedMask(NamedTuple):
    """A dropout mask of attention probabilities as Philox counters (ops/counter.py); kernels draw it on the fly.

    sample_indices: [B] int64. heads: the global indices of the tensors' heads. dropped: a probability is dropped for
    this many of the MASK_LEVELS values; above 0.
    """

    key: tuple[int, int]
    sample_indices: Tensor
    heads: range
    dropped: int

    def draw(self, queries: int, keys: int) -> Mask:
        """Return the mask [B, heads, queries, keys]; the queries are the last of the `keys` positions."""
        return self.draw_block(range(keys - queries, keys), range(keys))

    def draw_block(self, queries: range, keys: range) -> Mask:
        """Return the mask of these positions: [B, heads, queries, keys]."""
        keep = keep_probabilities(
            self.key, self.sample_indices, self.heads, queries, keys, dropped=self.dropped
        )
        return Mask(keep, MASK_LEVELS / (MASK_LEVELS - self.dropped))


class _Dropout(torch.autograd.Function):
    """Dropout that saves only the mask, one byte per value: reading the mask is far cheaper than drawing it again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.mul(values, keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.mul(grad, keep).mul_(ctx.scale), None, None


def dropout(values: Tensor, mask: Mask | None) -> Tensor:
    """Return values * mask.keep * mask.scale in new memory; without a mask, `values` themselves."""
    if mask is None:
        return values
    dropped: Tensor = _Dropout.apply(values, mask.keep, mask.scale)
    return dropped
