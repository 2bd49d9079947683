"""FlatRange: which elements of which parameter lie where in a tensor that an optimizer updates."""

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter


@dataclass(frozen=True)
class FlatRange:
    """A flat range of one parameter: from `start` in its flattened shard, from `offset` in the tensor `flat`.

    flat: a master of a whole shard, or ZeRO's partition of a group. group: the index of that partition.
    copies: the number of ranks that update the same range.
    """

    parameter: Parameter
    start: int
    size: int
    flat: Tensor
    offset: int = 0
    group: int = 0
    copies: int = 1

    def of(self, values: Tensor) -> Tensor:
        """The elements of this range in a tensor laid out as `flat`."""
        return values.detach().view(-1).narrow(0, self.offset, self.size)


def part_bounds(parameter: Parameter, mesh: ParallelMesh) -> list[int]:
    """Return where each part of a parameter begins in its flattened shard, and where the last one ends."""
    row = prod(mesh.local_shape(parameter)[1:])
    return [*accumulate((rows * row for rows in mesh.rows(parameter)), initial=0)]


def partition_of(tensor: Any) -> Tensor:
    """Return this rank's partition of a weight under ZeRO 3, flat; its end may be padding."""
    partition = tensor.ds_tensor
    if partition.status.name == "NOT_AVAILABLE":  # it lies in a file
        return mapped(tensor.nvme_swapper.get_path(tensor), partition.ds_numel, tensor.dtype)
    values: Tensor = partition.detach().view(-1)
    return values


def mapped(path: str, values: int, dtype: torch.dtype) -> Tensor:
    """Return the values in a file, read and written as they are touched: none of them is in memory before."""
    return torch.from_file(path, shared=True, size=values, dtype=dtype)
