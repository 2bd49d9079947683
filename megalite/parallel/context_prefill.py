"""The tokens of a long prompt that each context-parallel rank computes, where every rank keeps all keys and values."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalite.parallel.collectives import gather_ranks
from megalite.parallel.mesh import RankGroup
from megalite.topology.context import LEAST_TOKENS, uneven_blocks, zig_zag


@dataclass(frozen=True)
class SegmentShare:
    """A segment of `count` tokens of a prompt over ranks: zig-zag, in blocks whose lengths differ by one at most.

    So rank 0 has its last token.
    """

    ranks: RankGroup
    count: int

    @classmethod
    def where_it_pays(cls, ranks: RankGroup, count: int) -> "SegmentShare | None":
        """Return the share of a segment that is long enough for all ranks; None: every rank computes all of it."""
        return cls(ranks, count) if ranks.size > 1 and count >= LEAST_TOKENS * ranks.size else None

    @property
    def own(self) -> tuple[range, ...]:
        """The places in the segment of this rank's tokens."""
        return tuple(self._blocks[block] for block in zig_zag(self.ranks.size)[self.ranks.rank])

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values of all tokens in order: [this rank's tokens, ...] -> [count, ...]. Collective."""
        order = zig_zag(self.ranks.size)
        longest = max(map(len, self._blocks))
        blocks = values.split([len(block) for block in self.own])
        # All ranks send as many, of which the last one of a shorter block is left out again.
        padded = values.new_zeros(len(blocks), longest, *values.shape[1:])
        for place, block in zip(padded, blocks, strict=True):
            place[: len(block)] = block
        of_all = gather_ranks(padded, self.ranks).flatten(0, 1)
        place_of = {block: place for place, block in enumerate(block for own in order for block in own)}
        return torch.cat(
            [of_all[place_of[number], : len(block)] for number, block in enumerate(self._blocks)]
        )

    @cached_property
    def _blocks(self) -> tuple[range, ...]:
        return uneven_blocks(self.count, self.ranks.size)
