"""The mesh axes, the roles of their groups, and the coordinates of each rank."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import product
from math import prod

# Axis -> its setting in [parallel], outermost first: tensor-parallel ranks are neighbours because their traffic
# is the heaviest.
AXES: Mapping[str, str] = {"pp": "pipeline", "dp": "data", "tp": "tensor"}

# Role of a group -> the axes on which its ranks differ. Code asks the mesh for a role, so that a new axis joins here.
ROLES: Mapping[str, tuple[str, ...]] = {
    # Ranks that read different samples.
    "batch": ("dp",),
    # Ranks whose tokens make up the loss: it is normalised by the sum of their token weights.
    "loss": ("dp",),
    # Ranks with the same dense weights: they average gradients, and ZeRO shards the optimizer state over them.
    "dense_gradients": ("dp",),
    # Ranks that together hold one copy of the model.
    "replica": ("pp", "tp"),
}


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank on each axis, in the order of AXES."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in zip(AXES, astuple(self), strict=True))


@dataclass(frozen=True)
class Layout:
    """The number of ranks on each axis. rank = (pp * data + dp) * tensor + tp, as in DeepSpeed and Megatron-LM."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its number of ranks, in the order of AXES."""
        return {axis: getattr(self, setting) for axis, setting in AXES.items()}

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`; ValueError outside of the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        places = {}
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        return Coordinates(**places)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        rank = 0
        for size, place in zip(self.sizes.values(), astuple(at), strict=True):
            rank = rank * size + place
        return rank

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, `rank` included and ascending, with the same coordinates on all axes but the named ones."""
        places = zip(self.sizes.items(), astuple(self.coordinates(rank)), strict=True)
        ranges = [range(size) if axis in axes else (place,) for (axis, size), place in places]
        return tuple(self.rank(Coordinates(*place)) for place in product(*ranges))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all peer groups over the named axes: a partition of the world, ordered by first rank."""
        return tuple(dict.fromkeys(self.peers(rank, *axes) for rank in range(self.world_size)))

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.coordinates(rank)})"
