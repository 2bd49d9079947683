"""The mesh axes, and the coordinates of each rank on them. No torch."""

from dataclasses import dataclass
from itertools import product

# Outermost first. A tensor-parallel group has the heaviest traffic, so its ranks are neighbours.
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on each mesh axis."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp {self.pp}, dp {self.dp}, tp {self.tp}"


@dataclass(frozen=True)
class Layout:
    """The number of ranks on each axis. rank = (pp * data + dp) * tensor + tp, as in DeepSpeed and Megatron-LM."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of ranks on each axis, in the order of AXES: pp, dp, tp."""
        return (self.pipeline, self.data, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`; ValueError outside of the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        outer, tp = divmod(rank, self.tensor)
        pp, dp = divmod(outer, self.data)
        return Coordinates(pp, dp, tp)

    def rank(self, at: Coordinates) -> int:
        return (at.pp * self.data + at.dp) * self.tensor + at.tp

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, `rank` included and ascending, with the same coordinates on all axes but the named ones."""
        at = self.coordinates(rank)
        fixed = {"pp": at.pp, "dp": at.dp, "tp": at.tp}
        ranges = [
            range(size) if axis in axes else (fixed[axis],)
            for axis, size in zip(AXES, self.sizes, strict=True)
        ]
        return tuple(self.rank(Coordinates(*place)) for place in product(*ranges))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all peer groups over the named axes: a partition of the world, ordered by first rank."""
        return tuple(dict.fromkeys(self.peers(rank, *axes) for rank in range(self.world_size)))

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.coordinates(rank)})"
