"""Dropout by a mask that is given (Srivastava et al., "Dropout", 2014)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.ops.counter import MASK_LEVELS, keep_probabilities


class Mask(NamedTuple):
    """keep: bool, the shape of what it is applied to; scale: one over the probability that it is true."""

    keep: Tensor
    scale: float


class CountedMask(NamedTuple):
    """Of attention's probabilities, as what it is drawn from (ops/counter.py): compiled attention draws it by itself.

    samples: [B] int64; heads: those of the tensors it is for, among all; dropped: of MASK_LEVELS, more than 0.
    """

    key: tuple[int, int]
    samples: Tensor
    heads: range
    dropped: int

    def draw(self, queries: int, keys: int) -> Mask:
        """[B, heads, queries, keys], the queries being the last of as many positions as there are keys."""
        places = range(keys - queries, keys), range(keys)
        keep = keep_probabilities(self.key, self.samples, self.heads, *places, dropped=self.dropped)
        return Mask(keep, MASK_LEVELS / (MASK_LEVELS - self.dropped))


class _Dropout(torch.autograd.Function):
    """One node that keeps the mask alone, a byte a value: drawing it again costs far more than reading it."""

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
    """values * mask.keep * mask.scale, in new memory; `values` themselves without a mask."""
    if mask is None:
        return values
    dropped: Tensor = _Dropout.apply(values, mask.keep, mask.scale)
    return dropped
