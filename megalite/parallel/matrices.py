"""Functions of whole matrices of which every rank holds a slice, for optimizers that mix rows and columns.

The work is spread: one rank, of the tensor-parallel ranks and their data-parallel copies, assembles each matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.collectives import broadcast, exchange
from megalite.parallel.gradients import buckets
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.sharding import Part, ShardSpec, TensorSlice

MatrixFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatrixShard:
    """This rank's slice of one canonical matrix.

    spec: of the registered parameter that the matrix is a part of. values: [rows here, columns here].
    """

    spec: ShardSpec
    part: Part
    values: Tensor

    def slice_on(self, rank: int, mesh: ParallelMesh) -> TensorSlice:
        """Return the slice of the matrix that a tensor-parallel rank holds."""
        return self.spec.slice_of(self.part, rank, mesh.tp.size)

    def sent_by(self, rank: int, mesh: ParallelMesh) -> bool:
        """Return whether the matrix takes the values of `rank`: the first of the ranks that hold the same slice.

        The others do not count: backward leaves zeros as their gradient.
        """
        return self.spec.first_holder(self.part, rank, mesh.tp.size) == rank

    @property
    def work(self) -> int:
        """The multiplications of the matrix with its own transpose."""
        rows, columns = self.part.shape
        return rows * columns * min(rows, columns)


def matrix_shards(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> Iterator[MatrixShard]:
    """Yield this rank's slice of each matrix of a parameter, as views of `tensor`, which has the parameter's shape."""
    row = 0
    for part, region in parameter.spec.slices(mesh.tp.rank, mesh.tp.size):
        yield MatrixShard(parameter.spec, part, tensor[row : row + region.shape[0]])
        row += region.shape[0]


def map_matrices(
    shards: Sequence[MatrixShard], function: MatrixFunction, mesh: ParallelMesh
) -> Iterator[Tensor]:
    """Yield, for each shard, this rank's slice of `function(whole matrix)`, in order.

    function: [rows, columns] -> [rows, columns] of the same dtype. Collective over the tensor-parallel ranks and over
    the data-parallel copies, which hold equal shards in the same order.
    """
    workers = mesh.tp.size * mesh.dense_gradients.size
    if workers == 1:
        yield from (function(each.values) for each in shards)
        return

    def bytes_a_worker(shard: MatrixShard) -> tuple[torch.dtype, int]:
        rows, columns = shard.part.shape
        return shard.values.dtype, rows * columns * shard.values.element_size() // workers

    # A bucket has enough matrices to keep every rank busy.
    for bucket in buckets(shards, bytes_a_worker):
        yield from _mapped(bucket, function, mesh)


def _mapped(shards: Sequence[MatrixShard], function: MatrixFunction, mesh: ParallelMesh) -> list[Tensor]:
    """Compute a bucket: over tp the matrices that fall to this copy, then each copy sends its results to the others."""
    copies, owners = mesh.dense_gradients, _owners(shards, mesh)
    found: dict[int, Tensor] = {}
    assigned = [
        [index for index, (copy, _) in enumerate(owners) if copy == each] for each in range(copies.size)
    ]
    own = assigned[copies.rank]
    computed = _mapped_over_tp(
        [shards[index] for index in own], [owners[index][1] for index in own], function, mesh
    )
    for copy, indices in enumerate(assigned):
        regions = [shards[index].slice_on(mesh.tp.rank, mesh) for index in indices]
        flat = shards[0].values.new_empty(sum(region.numel for region in regions))
        if copy == copies.rank and computed:
            torch.cat([each.flatten() for each in computed], out=flat)
        if indices:
            broadcast(flat, copies, copy)
        found |= dict(zip(indices, _pieces(flat, regions), strict=True))
    return [found[index] for index in range(len(shards))]


def _owners(shards: Sequence[MatrixShard], mesh: ParallelMesh) -> list[tuple[int, int]]:
    """Return, for each matrix, its data-parallel and tensor-parallel rank: even work, the same choice on every rank."""
    load = {(copy, rank): 0 for copy in range(mesh.dense_gradients.size) for rank in range(mesh.tp.size)}
    owners: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(shards)), key=lambda each: -shards[each].work):
        owners[index] = min(load, key=lambda worker: (load[worker], worker))
        load[owners[index]] += shards[index].work
    return [owners[index] for index in range(len(shards))]


def _mapped_over_tp(
    shards: Sequence[MatrixShard], owners: Sequence[int], function: MatrixFunction, mesh: ParallelMesh
) -> list[Tensor]:
    """Return this rank's slices of the results; `owners`: the tensor-parallel rank that computes each matrix."""
    if not shards:
        return []
    here, ranks, empty = mesh.tp.rank, range(mesh.tp.size), shards[0].values.new_empty(0)
    held_by = [
        [shard for shard, owner in zip(shards, owners, strict=True) if owner == each] for each in ranks
    ]
    gathered = _exchanged(
        [[shard.values for shard in held_by[each] if shard.sent_by(here, mesh)] for each in ranks],
        [
            [shard.slice_on(each, mesh) for shard in held_by[here] if shard.sent_by(each, mesh)]
            for each in ranks
        ],
        empty,
        mesh,
    )
    arrived = [iter(each) for each in gathered]
    results = []
    for shard in held_by[here]:
        whole = shard.values.new_empty(shard.part.shape)
        for each in ranks:
            if shard.sent_by(each, mesh):
                _cut(whole, shard.slice_on(each, mesh)).copy_(next(arrived[each]))
        results.append(function(whole))
    scattered = _exchanged(
        [
            [
                _cut(result, shard.slice_on(each, mesh))
                for shard, result in zip(held_by[here], results, strict=True)
            ]
            for each in ranks
        ],
        [[shard.slice_on(here, mesh) for shard in held_by[each]] for each in ranks],
        empty,
        mesh,
    )
    slices = [iter(each) for each in scattered]
    return [next(slices[owner]) for owner in owners]


def _exchanged(
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[TensorSlice]],
    empty: Tensor,
    mesh: ParallelMesh,
) -> list[list[Tensor]]:
    """Send tensors to each tensor-parallel rank; return those that each rank sends here, of the slices `received`.

    empty: a tensor without elements, of their dtype: a rank may have nothing to send.
    """
    pieces = [torch.cat([empty, *(each.flatten() for each in tensors)]) for tensors in sent]
    sizes = [sum(region.numel for region in regions) for regions in received]
    flat = exchange(pieces, sizes, mesh.tp)
    return [_pieces(values, regions) for values, regions in zip(flat, received, strict=True)]


def _pieces(flat: Tensor, regions: Sequence[TensorSlice]) -> list[Tensor]:
    """Split a flat tensor into tensors of the slices' shapes."""
    pieces = flat.split([region.numel for region in regions])
    return [piece.view(region.shape) for piece, region in zip(pieces, regions, strict=True)]


def _cut(whole: Tensor, region: TensorSlice) -> Tensor:
    """Return a slice of a whole matrix, as a view."""
    (top, left), (rows, columns) = region.offsets, region.shape
    return whole[top : top + rows, left : left + columns]
