"""Functions of whole matrices of which every rank holds a slice, for optimizers that mix rows and columns.

The work is spread: one rank, of those that hold slices and of their copies, assembles each matrix.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megalite.parallel.collectives import broadcast, exchange
from megalite.parallel.gradients import buckets
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.parameters import Parameter
from megalite.topology.sharding import Part, TensorSlice

MatrixFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatrixShard:
    """This rank's slice of one canonical matrix.

    parameter: the registered parameter that the matrix is a part of. values: [rows here, columns here].
    ranks: those over which the parameter is cut. copies: those with the same slice.
    """

    parameter: Parameter
    part: Part
    values: Tensor
    ranks: RankGroup
    copies: RankGroup

    def slice_on(self, rank: int) -> TensorSlice:
        """Return the slice of the matrix that a rank of `ranks` holds."""
        return self.parameter.spec.slice_of(self.part, rank, self.ranks.size)

    def sent_by(self, rank: int) -> bool:
        """Return whether the matrix takes the values of `rank`: the first of the ranks that hold the same slice.

        The others do not count: backward leaves zeros as their gradient.
        """
        return self.parameter.spec.first_holder(self.part, rank, self.ranks.size) == rank

    @property
    def work(self) -> int:
        """The multiplications of the matrix with its own transpose."""
        rows, columns = self.part.shape
        return rows * columns * min(rows, columns)


def matrix_shards(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> Iterator[MatrixShard]:
    """Yield this rank's slice of each matrix of a parameter, as views of `tensor`, which has the parameter's shape."""
    ranks, copies = mesh.cut_over(parameter), mesh.copies(parameter)
    for part, _, values in mesh.parts_of(parameter, tensor):
        yield MatrixShard(parameter, part, values, ranks, copies)


def map_matrices(shards: Sequence[MatrixShard], function: MatrixFunction) -> Iterator[Tensor]:
    """Yield, for each shard, this rank's slice of `function(whole matrix)`, in order.

    function: [rows, columns] -> [rows, columns] of the same dtype. Collective over the ranks that hold slices and over
    their copies, which hold equal shards in the same order.
    """

    def bytes_a_worker(shard: MatrixShard) -> tuple[Hashable, int]:
        whole = prod(shard.part.shape) * shard.values.element_size()
        workers = shard.ranks.size * shard.copies.size
        return (shard.values.dtype, shard.ranks.ranks, shard.copies.ranks), whole // workers

    # A bucket has enough matrices to keep every rank busy.
    for bucket in buckets(shards, bytes_a_worker):
        yield from _mapped(bucket, function)


def _mapped(shards: Sequence[MatrixShard], function: MatrixFunction) -> Iterable[Tensor]:
    """Compute a bucket: this copy's matrices over the ranks, then each copy sends its results to the others."""
    ranks, copies = shards[0].ranks, shards[0].copies
    if ranks.size * copies.size == 1:
        return (function(shard.values) for shard in shards)
    owners = _owners(shards, ranks.size, copies.size)
    products: dict[int, Tensor] = {}
    assigned = [
        [index for index, (copy, _) in enumerate(owners) if copy == rank] for rank in range(copies.size)
    ]
    own = assigned[copies.rank]
    computed = _mapped_over_ranks(
        [shards[index] for index in own], [owners[index][1] for index in own], function, ranks
    )
    for copy, indices in enumerate(assigned):
        regions = [shards[index].slice_on(ranks.rank) for index in indices]
        flat = shards[0].values.new_empty(sum(region.numel for region in regions))
        if copy == copies.rank and computed:
            torch.cat([each.flatten() for each in computed], out=flat)
        if indices:
            broadcast(flat, copies, copy)
        products |= dict(zip(indices, _pieces(flat, regions), strict=True))
    return [products[index] for index in range(len(shards))]


def _owners(shards: Sequence[MatrixShard], ranks: int, copies: int) -> list[tuple[int, int]]:
    """Return, for each matrix, its copy and its rank: even work, the same choice on every rank."""
    load = {(copy, rank): 0 for copy in range(copies) for rank in range(ranks)}
    owners: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(shards)), key=lambda index: -shards[index].work):
        owners[index] = min(load, key=lambda worker: (load[worker], worker))
        load[owners[index]] += shards[index].work
    return [owners[index] for index in range(len(shards))]


def _mapped_over_ranks(
    shards: Sequence[MatrixShard], owners: Sequence[int], function: MatrixFunction, ranks: RankGroup
) -> list[Tensor]:
    """Return this rank's slices of the results; `owners`: the rank of `ranks` that computes each matrix."""
    if not shards:
        return []
    here, every, empty = ranks.rank, range(ranks.size), shards[0].values.new_empty(0)
    held_by = [
        [shard for shard, owner in zip(shards, owners, strict=True) if owner == rank] for rank in every
    ]
    gathered = _exchanged(
        [[shard.values for shard in held_by[rank] if shard.sent_by(here)] for rank in every],
        [[shard.slice_on(rank) for shard in held_by[here] if shard.sent_by(rank)] for rank in every],
        empty,
        ranks,
    )
    arrived = [iter(each) for each in gathered]
    results = []
    for shard in held_by[here]:
        whole = shard.values.new_empty(shard.part.shape)
        for rank in every:
            if shard.sent_by(rank):
                _cut(whole, shard.slice_on(rank)).copy_(next(arrived[rank]))
        results.append(function(whole))
    scattered = _exchanged(
        [
            [_cut(result, shard.slice_on(rank)) for shard, result in zip(held_by[here], results, strict=True)]
            for rank in every
        ],
        [[shard.slice_on(here) for shard in held_by[rank]] for rank in every],
        empty,
        ranks,
    )
    slices = [iter(each) for each in scattered]
    return [next(slices[owner]) for owner in owners]


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[TensorSlice]],
    empty: Tensor,
    ranks: RankGroup,
) -> list[list[Tensor]]:
    """Send tensors to each rank; return those that each rank sends here, of the slices `received`.

    empty: a tensor without elements, of their dtype: a rank may have nothing to send.
    """
    pieces = [torch.cat([empty, *(each.flatten() for each in tensors)]) for tensors in sent]
    sizes = [sum(region.numel for region in regions) for regions in received]
    flat = exchange(pieces, sizes, ranks)
    return [_pieces(values, regions) for values, regions in zip(flat, received, strict=True)]


def _pieces(flat: Tensor, regions: Sequence[TensorSlice]) -> list[Tensor]:
    """Split a flat tensor into tensors of the slices' shapes."""
    pieces = flat.split([region.numel for region in regions])
    return [piece.view(region.shape) for piece, region in zip(pieces, regions, strict=True)]


def _cut(whole: Tensor, region: TensorSlice) -> Tensor:
    """Return a slice of a whole matrix, as a view."""
    (top, left), (rows, columns) = region.offsets, region.shape
    return whole[top : top + rows, left : left + columns]
