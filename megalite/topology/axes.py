"""The mesh axes, the roles of their groups, and the coordinates of each rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

# Axis -> its setting in [parallel], outermost first: tensor-parallel ranks are neighbours because their traffic
# is the heaviest, and then those that share a sequence.
AXES: Mapping[str, str] = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}

# Role of a group -> the axes on which its ranks differ. Code asks the mesh for a role, so that a new axis joins here.
ROLES: Mapping[str, tuple[str, ...]] = {
    # Ranks that read different samples.
    "batch": ("dp",),
    # Ranks whose tokens make up the loss: it is normalised by the sum of their token weights.
    "loss": ("dp", "cp"),
    # Ranks with the same dense weights: they average gradients, and ZeRO shards the optimizer state over them.
    "dense_gradients": ("dp", "cp"),
    # Ranks that together hold one copy of the model.
    "replica": ("pp", "tp"),
}
EXPERT_AXES = ("edp", "ep", "etp")
"""The ranks of a stage laid out again for its experts, the last innermost: those with the same shards of the same
experts, those among which experts are divided, and those that share each expert (Megatron-Core's parallel folding)."""

# Axis over which a parameter is cut (`ShardSpec.axis`) -> role of the ranks that hold the same shard of it.
COPIES: Mapping[str, str] = {"tp": "dense_gradients", "etp": "edp"}


@dataclass(frozen=True)
class Coordinates:
    """The place of a rank on each axis."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """The number of ranks on each axis. rank = ((pp * data + dp) * context + cp) * tensor + tp.

    That is the order of DeepSpeed and, with a context axis, of Megatron-LM.
    expert: ranks among which the experts of a layer are divided. expert_tensor: ranks that share each expert: 1 or
    `tensor` in training, any divisor of `tensor` without; None: `tensor`. The ranks of a stage, in their order, are
    EXPERT_AXES for these.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @classmethod
    def of(cls, settings: Any, data: int = 1) -> "Layout":
        """Return the layout of the settings in [parallel]; data: the number of replicas, which may be "auto" there."""
        names = (*AXES.values(), "expert", "expert_tensor")
        return cls(data=data, **{name: getattr(settings, name) for name in names if name != "data"})

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its number of ranks, in the order of AXES."""
        return {axis: getattr(self, setting) for axis, setting in AXES.items()}

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Axis of EXPERT_AXES -> its number of ranks; ValueError where they do not divide the ranks of a stage."""
        shared = self.tensor if self.expert_tensor is None else self.expert_tensor
        stage = self.world_size // self.pipeline
        if stage % (self.expert * shared):
            raise ValueError(
                f"{stage} ranks of a stage are no multiple of expert {self.expert} * {shared} ranks each"
            )
        return {"edp": stage // (self.expert * shared), "ep": self.expert, "etp": shared}

    @property
    def replica_size(self) -> int:
        """The number of ranks that read the same samples."""
        return self.world_size // self.data

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same part of the model, where none is sharded over data-parallel ranks."""
        return self.data * self.context

    @property
    def _named_axes(self) -> list[str]:
        """The axes that messages name: others than those of model and batch only if their size is above 1."""
        always = {*ROLES["replica"], *ROLES["batch"]}
        return [axis for axis, size in self.sizes.items() if axis in always or size > 1]

    @property
    def named_sizes(self) -> dict[str, int]:
        """Setting in [parallel] -> size, the innermost axis first and data last, for messages."""
        axes = sorted(reversed(self._named_axes), key=lambda axis: axis in ROLES["batch"])
        return {AXES[axis]: self.sizes[axis] for axis in axes}

    @property
    def text(self) -> str:
        """The sizes as people write them: "tensor 2 x pipeline 2 x data 2"."""
        experts = f", expert {self.expert}" if self.expert > 1 else ""
        return " x ".join(f"{name} {size}" for name, size in self.named_sizes.items()) + experts

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`; ValueError outside of the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        places = {}
        for axis, size in reversed(self.sizes.items()):
            rank, places[axis] = divmod(rank, size)
        return Coordinates(**places)

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, `rank` included and ascending, with the same coordinates on all axes but the named ones."""
        at, ranks = self.coordinates(rank), [0]
        for axis, size in self.sizes.items():
            places = range(size) if axis in axes else (getattr(at, axis),)
            ranks = [outer * size + place for outer in ranks for place in places]
        return tuple(ranks)

    def expert_peers(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return axis of EXPERT_AXES -> the ranks of its stage, `rank` included, that differ from it there alone."""
        # The ranks of a stage follow each other.
        place, peers, stride = rank % (self.world_size // self.pipeline), {}, 1
        for axis, size in reversed(self.expert_sizes.items()):
            first = rank - place // stride % size * stride
            peers[axis] = tuple(range(first, first + size * stride, stride))
            stride *= size
        return peers

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all peer groups over the named axes: a partition of the world, ordered by first rank."""
        return tuple(dict.fromkeys(self.peers(rank, *axes) for rank in range(self.world_size)))

    def named_places(self, rank: int) -> dict[str, int]:
        """Return axis -> the place of `rank`, for messages."""
        at = self.coordinates(rank)
        return {axis: getattr(at, axis) for axis in self._named_axes}

    def describe(self, rank: int) -> str:
        places = ", ".join(f"{axis} {place}" for axis, place in self.named_places(rank).items())
        return f"rank {rank} ({places})"
