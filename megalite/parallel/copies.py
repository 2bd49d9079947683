"""Compares the copies of each tensor over the ranks that hold one: silent data corruption of a host or card shows here.

Ranks that compute the same update from the same sums hold the same bits. A checksum of each tensor is compared, so a
check reads the tensors once and sends eight bytes for each.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from megalite.parallel.collectives import gather_ranks
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.parameters import Parameter
from megalite.topology.sharding import Part
from megalite.topology.state import WEIGHT

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Copy:
    """A tensor of this rank: the parameter, or a state of it, of its local shape."""

    parameter: Parameter
    values: Tensor
    key: str = WEIGHT


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ.

    place: stage, and place among the tensors of the rank that found it. name: canonical, with the key of a state.
    ranks: those whose copy is not that of the most of `holders`; all holders where no copy has a majority.
    others: the number of other tensors whose copies differ.
    """

    place: tuple[int, int]
    name: str
    ranks: frozenset[int]
    holders: frozenset[int]
    others: int = 0


def checksum(values: Tensor) -> Tensor:
    """Sum the bit patterns of a tensor as integers, [] int64: any one flipped bit changes it."""
    return values.detach().contiguous().view(_BITS[values.element_size()]).sum(dtype=torch.int64)


class CopyCheck:
    """The comparison of all copies that the ranks of `mesh` hold of `tensors`, which every rank lists alike.

    Not compared: what one rank alone holds, and copies that each update overwrites with the first one: tied weights
    on several stages, heads that tensor-parallel ranks share.
    """

    def __init__(self, tensors: Iterable[Copy], mesh: ParallelMesh):
        self._tensors, self._mesh = tuple(tensors), mesh
        # Group -> the place of each tensor that all of its ranks hold.
        self._groups: dict[RankGroup, list[int]] = {}
        for place, tensor in enumerate(self._tensors):
            cut = [mesh.cut_over(tensor.parameter)] if tensor.parameter.spec.dim is None else []
            for group in (mesh.copies(tensor.parameter), *cut):
                if group.size > 1:
                    self._groups.setdefault(group, []).append(place)

    @torch.no_grad()
    def differences(self) -> Sequence[Difference]:
        """Return the differences that this rank sees. Collective over the groups that hold copies."""
        sums = [
            torch.stack([checksum(rows) for *_, rows in self._mesh.parts_of(each.parameter, each.values)])
            for each in self._tensors
        ]
        found = []
        for group, places in self._groups.items():
            table = gather_ranks(torch.cat([sums[place] for place in places]), group).T.tolist()
            names = [(place, part) for place in places for part in self._tensors[place].parameter.spec.parts]
            for (place, part), values in zip(names, table, strict=True):
                if len(set(values)) > 1:
                    found.append(self._difference(place, part, dict(zip(group.ranks, values, strict=True))))
        return found

    def _difference(self, place: int, part: Part, values: Mapping[int, int]) -> Difference:
        key = self._tensors[place].key
        name = part.name if key == WEIGHT else f"{key} of {part.name}"
        value, count = Counter(values.values()).most_common(1)[0]
        several = 2 * count > len(values)
        ranks = (rank for rank, own in values.items() if not several or own != value)
        return Difference((self._mesh.at.pp, place), name, frozenset(ranks), frozenset(values))

    def first_difference(self) -> Difference | None:
        """Return the first tensor, in model order, whose copies differ; the same on every rank. Collective.

        Its ranks are those that every group which sees the difference suspects, if there are such.
        """
        found = self.differences()
        if not self._mesh.sum_over_world([float(bool(found))])[0]:
            return None
        gathered = self._mesh.gather_objects(found) or []
        first = _joined([each for differences in gathered for each in differences]) if gathered else None
        joined: Difference = self._mesh.broadcast_object(first)
        return joined


def _joined(differences: Sequence[Difference]) -> Difference:
    first = min(differences, key=lambda each: each.place)
    same = [each for each in differences if each.name == first.name]
    suspects = reduce(frozenset.intersection, (each.ranks for each in same))
    holders = frozenset().union(*(each.holders for each in same))
    others = len({each.name for each in differences}) - 1
    return Difference(first.place, first.name, suspects or holders, holders, others)
