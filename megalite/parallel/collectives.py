"""Conjugate pairs of collectives: what is the identity forward is a sum backward, and the other way round.

Names follow Shoeybi et al., "Megatron-LM", 2019, figure 3 ("f" and "g"). An axis of one rank communicates nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.mesh import Axis


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward: "f"."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(
            memory_format=torch.contiguous_format
        )  # autograd may still need the caller's tensor
        dist.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward: "g". Overwrites its input, which no linear needs again."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(partial_sums)
        dist.all_reduce(partial_sums, group=axis.group)
        return partial_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to(hidden_states: Tensor, axis: Axis) -> Tensor:
    """The same values; gradients are summed over the axis, since every rank used its own copy."""
    return hidden_states if axis.size == 1 else _Copy.apply(hidden_states, axis)  # type: ignore[no-untyped-call]


def reduce_from(partial_sums: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in place; each rank's gradient passes through unchanged."""
    return partial_sums if axis.size == 1 else _Reduce.apply(partial_sums, axis)  # type: ignore[no-untyped-call]


def all_reduce(values: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over the axis, outside autograd; returns `values`."""
    if axis.size > 1:
        dist.all_reduce(values, op=op, group=axis.group)
    return values


def gather_last_dim(shard: Tensor, sizes: tuple[int, ...], axis: Axis) -> Tensor:
    """The full tensor from shards of its last dim with the given sizes, on every rank; outside autograd."""
    if axis.size == 1:
        return shard
    # gloo wants equal shapes, and uneven vocabulary shards differ by one: send the widest.
    widest = max(sizes)
    padded = torch.nn.functional.pad(shard, (0, widest - shard.shape[-1])).contiguous()
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=axis.group)
    return torch.cat([part[..., :size] for part, size in zip(gathered, sizes, strict=True)], dim=-1)
