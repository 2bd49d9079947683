"""Ranks and the mesh axes they sit on, and which layers each pipeline stage holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

# Outermost first: ranks of one tensor-parallel group are neighbours, as their traffic is the heaviest.
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Coordinates:
    """Where a rank sits on each axis."""

    pp: int
    dp: int
    tp: int

    def __str__(self) -> str:
        return f"pp {self.pp}, dp {self.dp}, tp {self.tp}"


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. rank = (pp * data + dp) * tensor + tp, as in DeepSpeed and Megatron-LM."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks along pp, dp, tp, in the order of AXES."""
        return (self.pipeline, self.data, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        outer, tp = divmod(rank, self.tensor)
        pp, dp = divmod(outer, self.data)
        return Coordinates(pp, dp, tp)

    def rank(self, at: Coordinates) -> int:
        return (at.pp * self.data + at.dp) * self.tensor + at.tp

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that share this rank's place on every axis not named, itself included, ascending."""
        at = self.coordinates(rank)
        fixed = {"pp": at.pp, "dp": at.dp, "tp": at.tp}
        ranges = [
            range(size) if axis in axes else (fixed[axis],)
            for axis, size in zip(AXES, self.sizes, strict=True)
        ]
        return tuple(self.rank(Coordinates(*place)) for place in product(*ranges))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every distinct peer group over the named axes: a partition of the world, ordered by first rank."""
        return tuple(dict.fromkeys(self.peers(rank, *axes) for rank in range(self.world_size)))

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.coordinates(rank)})"


def balanced_split(total: int, parts: int) -> tuple[range, ...]:
    """`total` items in `parts` contiguous runs whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def layers_of_stages(
    num_hidden_layers: int, stages: int, given: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The global layer indices of each stage; every layer stands on exactly one stage.

    Without `given` (layers a stage) the split is balanced; the extra layers go to the middle stages,
    since the first also embeds and the last also holds the head.
    Raises ValueError when `given` does not cover the layers exactly or leaves a stage empty.
    """
    if given is None:
        if stages > num_hidden_layers:
            raise ValueError(f"{stages} stages cannot each have one of {num_hidden_layers} layers")
        size, extra = divmod(num_hidden_layers, stages)
        first = (stages - extra + 1) // 2
        given = [size + (first <= stage < first + extra) for stage in range(stages)]
    if len(given) != stages or sum(given) != num_hidden_layers or min(given) < 1:
        raise ValueError(
            f"layers {list(given)} are not a split of {num_hidden_layers} layers over {stages} stages"
        )
    return tuple(_consecutive(given))


def _consecutive(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size
