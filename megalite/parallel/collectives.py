"""Conjugate pairs of collectives: the identity in forward is an all-reduce in backward, and the other way round.

Names follow Shoeybi et al., "Megatron-LM", 2019, figure 3 ("f" and "g"), and for sequence parallelism Korthikanti et
al., "Reducing activation recomputation in large Transformer models", 2022, figure 5 ("g" and "g-bar").
With a group of one rank nothing is communicated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launcher.control.progress import progress
from megalite.parallel.mesh import ParallelMesh, RankGroup

# Waits for a started collective and returns its result.
Pending = Callable[[], Tensor]


class _Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward: "f"."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(
            memory_format=torch.contiguous_format
        )  # autograd may still need the caller's tensor
        with progress.collective("all_reduce", ctx.ranks.role):
            dist.all_reduce(grad, group=ctx.ranks.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """All-reduce forward, identity backward: "g". Overwrites its input, which no linear's backward needs."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, ranks: RankGroup) -> Tensor:
        ctx.mark_dirty(partial_sums)
        with progress.collective("all_reduce", ranks.role):
            dist.all_reduce(partial_sums, group=ranks.group)
        return partial_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward, along dim 1."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return start_gather(shard, ranks)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_reduce_scatter(grad, ctx.ranks)(), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward, along dim 1."""

    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return start_reduce_scatter(partial_sums, ranks)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather(grad, ctx.ranks)(), None


class _GatherRanks(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward, along a new dim 0."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return gather_ranks(values, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        sums = torch.empty_like(grad[0])
        with progress.collective("reduce_scatter", ctx.ranks.role):
            dist.reduce_scatter_single(sums, grad.flatten(0, 1), group=ctx.ranks.group)
        return sums, None


class _AllToAll(torch.autograd.Function):
    """Rank r gets the r-th entry of dim 0 of every rank; its own conjugate."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return _exchanged(values, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.ranks), None


def _exchanged(values: Tensor, ranks: RankGroup) -> Tensor:
    values = values.contiguous()
    received = torch.empty_like(values)
    with progress.collective("all_to_all", ranks.role):
        dist.all_to_all_single(received, values, group=ranks.group)
    return received


def column_input(hidden_states: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return the input of a column-parallel product: [B, S, ...] from [B, positions held here, ...]."""
    return (
        gather_sequence(hidden_states, mesh.tp) if mesh.splits_sequence else copy_to(hidden_states, mesh.tp)
    )


def row_output(partial_sums: Tensor, mesh: ParallelMesh) -> Tensor:
    """Sum the partial outputs of a row-parallel product over tp: [B, positions held here, ...] from [B, S, ...]."""
    if mesh.splits_sequence:
        return reduce_scatter_sequence(partial_sums, mesh.tp)
    return reduce_from(partial_sums, mesh.tp)


def gather_sequence(shard: Tensor, ranks: RankGroup) -> Tensor:
    """All-gather positions: [B, S / n, ...] of each rank -> [B, S, ...]; the gradient is reduce-scattered."""
    if ranks.size == 1:
        return shard
    gathered: Tensor = _GatherSequence.apply(shard, ranks)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter_sequence(partial_sums: Tensor, ranks: RankGroup) -> Tensor:
    """Reduce-scatter positions: [B, S, ...] -> this rank's [B, S / n, ...]; the gradient is all-gathered."""
    if ranks.size == 1:
        return partial_sums
    scattered: Tensor = _ReduceScatterSequence.apply(partial_sums, ranks)  # type: ignore[no-untyped-call]
    return scattered


def stack_of_ranks(values: Tensor, ranks: RankGroup) -> Tensor:
    """All-gather `values` [...], of one shape on all ranks: [n, ...]; the gradient is reduce-scattered."""
    stacked: Tensor = _GatherRanks.apply(values, ranks)  # type: ignore[no-untyped-call]
    return stacked


def all_to_all(values: Tensor, ranks: RankGroup) -> Tensor:
    """Return entry r of [n, ...] on rank r, from every rank in rank order: [n, ...]; so does the gradient."""
    received: Tensor = _AllToAll.apply(values, ranks)  # type: ignore[no-untyped-call]
    return received


def copy_to(hidden_states: Tensor, ranks: RankGroup) -> Tensor:
    """Return the same values; the gradient is summed over the ranks, since every rank used its own copy."""
    return hidden_states if ranks.size == 1 else _Copy.apply(hidden_states, ranks)  # type: ignore[no-untyped-call]


def reduce_from(partial_sums: Tensor, ranks: RankGroup) -> Tensor:
    """Sum over the ranks in place; the gradient passes through unchanged."""
    return partial_sums if ranks.size == 1 else _Reduce.apply(partial_sums, ranks)  # type: ignore[no-untyped-call]


def all_reduce(values: Tensor, ranks: RankGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over the ranks, outside autograd; returns `values`."""
    if ranks.size > 1:
        with progress.collective("all_reduce", ranks.role):
            dist.all_reduce(values, op=op, group=ranks.group)
    return values


def gather_ranks(values: Tensor, ranks: RankGroup) -> Tensor:
    """All-gather `values` [...], of one shape on all ranks: [n, ...] in rank order; outside autograd."""
    if ranks.size == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty(ranks.size, *values.shape)
    with progress.collective("all_gather", ranks.role):
        dist.all_gather_single(gathered.flatten(0, 1), values.contiguous(), group=ranks.group)
    return gathered


def exchange(pieces: Sequence[Tensor], sizes: Sequence[int], ranks: RankGroup) -> list[Tensor]:
    """Send `pieces[r]` to each rank r and return what each rank sent here (all-to-all); outside autograd.

    pieces: flat, of one dtype, of any length. sizes: the number of elements that each rank sends here.
    """
    if ranks.size == 1:
        return [*pieces]
    received = pieces[0].new_empty(sum(sizes))
    lengths = [piece.numel() for piece in pieces]
    with progress.collective("all_to_all", ranks.role):
        dist.all_to_all_single(received, torch.cat([*pieces]), [*sizes], lengths, group=ranks.group)
    return [*received.split([*sizes])]


def broadcast(values: Tensor, ranks: RankGroup, source: int) -> Tensor:
    """Overwrite `values` with those of rank `source` of the group, outside autograd; returns `values`."""
    if ranks.size > 1:
        with progress.collective("broadcast", ranks.role):
            dist.broadcast(values, src=ranks.ranks[source], group=ranks.group)
    return values


def start_all_reduce(values: Tensor, ranks: RankGroup) -> Pending:
    """Start an in-place all-reduce of contiguous `values`; outside autograd, like every start_* here."""
    progress.collective("all_reduce", ranks.role)
    work = dist.all_reduce(values, group=ranks.group, async_op=True)

    def finish() -> Tensor:
        with progress.wait(ranks.role):
            work.wait()
        return values

    return finish


def start_gather(shard: Tensor, ranks: RankGroup) -> Pending:
    """Start the all-gather of dim 1: [B, S / n, ...] -> [B, S, ...]."""
    shard = shard.contiguous()
    gathered: Tensor = shard.new_empty(ranks.size, *shard.shape)
    progress.collective("all_gather", ranks.role)
    work = dist.all_gather_single(gathered.flatten(0, 1), shard, group=ranks.group, async_op=True)

    def finish() -> Tensor:
        with progress.wait(ranks.role):
            work.wait()
        # Ranks are the outer dim in memory: this copies, unless B is 1.
        return gathered.transpose(0, 1).flatten(1, 2)

    return finish


def start_reduce_scatter(partial_sums: Tensor, ranks: RankGroup, sums: Tensor | None = None) -> Pending:
    """Start the reduce-scatter of dim 1: [B, S, ...] -> [B, S / n, ...]; sums: contiguous, takes the result."""
    by_rank = partial_sums.unflatten(1, (ranks.size, -1)).transpose(0, 1).contiguous()
    scattered: Tensor = by_rank.new_empty(by_rank.shape[1:]) if sums is None else sums
    progress.collective("reduce_scatter", ranks.role)
    work = dist.reduce_scatter_single(scattered, by_rank.flatten(0, 1), group=ranks.group, async_op=True)

    def finish(_: Tensor = by_rank) -> Tensor:  # the collective reads it until then
        with progress.wait(ranks.role):
            work.wait()
        return scattered

    return finish


def gather_last_dim(shard: Tensor, sizes: tuple[int, ...], ranks: RankGroup) -> Tensor:
    """All-gather shards of the last dim, of the given sizes, into the full tensor; outside autograd."""
    if ranks.size == 1:
        return shard
    # gloo needs equal shapes, and uneven vocabulary shards differ by one: pad all to the widest.
    widest = max(sizes)
    padded = torch.nn.functional.pad(shard, (0, widest - shard.shape[-1])).contiguous()
    gathered = [torch.empty_like(padded) for _ in sizes]
    with progress.collective("all_gather", ranks.role):
        dist.all_gather(gathered, padded, group=ranks.group)
    return torch.cat([part[..., :size] for part, size in zip(gathered, sizes, strict=True)], dim=-1)
