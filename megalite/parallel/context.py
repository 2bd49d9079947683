"""Context parallelism: the tokens of each row that a rank has, the cut of a batch, and rows put together again.

A row of S tokens consists of equal blocks, as many on each of the c ranks. A block table [rows, blocks] names the
blocks of rank 0, then those of rank 1, ..., each rank's ascending. `StepBatch.blocks` has a table of its own for each
row; without one all rows are cut zig-zag (`topology.context.zig_zag`).

Everything but attention works on each token alone, so that the batch is cut once, before its first layer (`cut`). Every
rank reads the whole rows: labels and positions are made before the cut, and documents stay whole, since keys of other
ranks are seen.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.collectives import all_to_all, stack_of_ranks
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.parallel.step_batch import StepBatch
from megalite.topology.context import zig_zag

_CUT = ("input_ids", "position_ids", "labels", "loss_mask")


@dataclass(frozen=True)
class ContextRows:
    """The rows of a micro batch, each cut into blocks over the ranks of a group.

    table: the block table [rows, blocks] int64. length: S. blocks: this rank's of each row; of all rows, if there is
    one entry. prefix: keys and values of a layer's virtual tokens, [tokens, 2, kv heads, D]; they are no part of S.
    """

    ranks: RankGroup
    table: Tensor = field(repr=False)
    length: int
    blocks: tuple[tuple[int, ...], ...]
    prefix: Tensor | None = None

    @classmethod
    def of(cls, rows: int, length: int, mesh: ParallelMesh, table: Tensor | None = None) -> "ContextRows":
        """Return the cut of rows of `length` tokens; table: that of a batch, in host memory; None: zig-zag."""
        ranks = mesh.cp_ring if mesh.context_method == "ring" else mesh.cp
        if table is None:
            same = _zig_zag_table(mesh.cp.size, mesh.device).expand(rows, -1)
            return cls(ranks, same, length, (zig_zag(mesh.cp.size)[mesh.cp.rank],))
        own = table.chunk(mesh.cp.size, dim=1)[mesh.cp.rank].tolist()
        return cls(ranks, table.to(mesh.device, non_blocking=True), length, tuple(map(tuple, own)))

    @property
    def block_length(self) -> int:
        """The number of tokens of a block."""
        return self.length // self.table.shape[1]

    @cached_property
    def positions(self) -> Tensor:
        """The place in its row of each token of this rank: [rows, S / c] int64."""
        own = self.table.chunk(self.ranks.size, dim=1)[self.ranks.rank]
        within = torch.arange(self.block_length, device=own.device)
        return (own.unsqueeze(2) * self.block_length + within).flatten(1)

    @cached_property
    def order(self) -> Tensor:
        """[rows * blocks] int64: where the blocks of all rows in order are in a stack [ranks, rows, blocks a rank]."""
        rows, blocks = self.table.shape
        each = blocks // self.ranks.size
        place = self.table.argsort(dim=1)
        row = torch.arange(rows, device=place.device).unsqueeze(1)
        return (place // each * (rows * each) + row * each + place % each).flatten()

    @cached_property
    def inverse(self) -> Tensor:
        """The inverse of `order`."""
        return self.order.argsort()

    def gathered(self, values: Tensor) -> Tensor:
        """Return the whole rows, in order, of this rank's tokens: [rows, S / c, ...] -> [rows, S, ...]."""
        return self._in_order(stack_of_ranks(values, self.ranks))

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's tokens of whole rows in order: [rows, S, H] -> [rows, S / c, H]."""
        places = self.positions.expand(len(values), -1).unsqueeze(2).expand(-1, -1, values.shape[2])
        return values.gather(1, places)

    def to_heads(self, values: Tensor) -> Tensor:
        """Change tokens for heads: [rows, S / c, c * heads, ...] -> [rows, S, heads, ...], this rank's, in order."""
        by_rank = values.unflatten(2, (self.ranks.size, -1)).movedim(2, 0)
        return self._in_order(all_to_all(by_rank, self.ranks))

    def to_tokens(self, values: Tensor) -> Tensor:
        """Invert `to_heads`."""
        blocks = values.reshape(self.order.shape[0], self.block_length, *values.shape[2:])
        rows = len(self.table)
        by_rank = reordered(blocks, self.inverse, self.order).view(
            self.ranks.size, rows, self.length // self.ranks.size, *values.shape[2:]
        )
        return all_to_all(by_rank, self.ranks).movedim(0, 2).flatten(2, 3)

    def _in_order(self, stacked: Tensor) -> Tensor:
        """[ranks, rows, S / c, ...] -> [rows, S, ...]."""
        rest = stacked.shape[3:]
        blocks = stacked.reshape(self.order.shape[0], self.block_length, *rest)
        return reordered(blocks, self.order, self.inverse).view(len(self.table), self.length, *rest)


@cache
def _zig_zag_table(ranks: int, device: torch.device) -> Tensor:
    """Return a row of the block table, [2 * ranks] int64; made once, since the host waits for a copy to a device."""
    return torch.tensor(zig_zag(ranks), device=device).flatten()


class _Reordered(torch.autograd.Function):
    """A permutation of dim 0; the gradient of indexing would add into zeros, in any order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def reordered(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return values[order] for a permutation `order` [N] int64 of dim 0 and its inverse."""
    permuted: Tensor = _Reordered.apply(values, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def rows_of(batch: StepBatch, mesh: ParallelMesh) -> ContextRows | None:
    """Return the cut of a batch that `cut` has cut; None where no rows are cut."""
    if mesh.cp.size == 1:
        return None
    rows, tokens = batch.input_ids.shape
    return ContextRows.of(rows, tokens * mesh.cp.size, mesh, batch.blocks)


def cut(batch: StepBatch, mesh: ParallelMesh) -> StepBatch:
    """Return this rank's tokens of whole rows: ids, positions, labels and weights [M * b, S / c]; the rest as it is.

    S must be divisible by the number of blocks, by default 2 c.
    """
    if mesh.cp.size == 1:
        return batch
    rows, length = batch.input_ids.shape
    positions = ContextRows.of(rows, length, mesh, batch.blocks).positions
    return replace(batch, **{name: getattr(batch, name).gather(1, positions) for name in _CUT})
