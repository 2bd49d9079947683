"""RankPlace: one rank of a layout, its share of each parameter, and which copies of it count. Without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megalite.topology.axes import AXES, COPIES, ROLES, Coordinates, Layout
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import Parameter, stage_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import Part, TensorSlice
from megalite.topology.stages import PipelineSplit, balanced_split


@dataclass(frozen=True)
class RankPlace:
    """One rank of a layout.

    The only place that answers, by `ShardSpec.axis` and the roles of the mesh: which slice of a parameter the rank
    holds, who holds the same one, who counts it in a sum over the world and who writes it.
    """

    layout: Layout
    rank: int

    @classmethod
    def of_stages(cls, layout: Layout) -> Iterator["RankPlace"]:
        """Yield the first rank of each stage, which holds as much as any rank of it."""
        yield from (cls(layout, rank) for rank in layout.peers(0, "pp"))

    @cached_property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @cached_property
    def peers(self) -> Mapping[str, tuple[int, ...]]:
        """Axis or role -> the ranks, this one included and ascending, that differ from this one there alone.

        The axes of experts among them. "tied": the first and the last stage, which both hold tied embeddings; only
        this rank on other stages.
        """
        reach = {**{axis: (axis,) for axis in AXES}, **ROLES}
        # Roles that differ by axes of a single rank have the same ranks, which are listed once.
        several = {axis for axis, size in self.layout.sizes.items() if size > 1}
        cut = {name: tuple(axis for axis in axes if axis in several) for name, axes in reach.items()}
        ranks = {axes: self.layout.peers(self.rank, *axes) for axes in set(cut.values())}
        peers = {name: ranks[axes] for name, axes in cut.items()}
        ends = tuple(dict.fromkeys((peers["pp"][0], peers["pp"][-1])))
        if self.layout.expert == 1 and self.layout.expert_tensor in (None, self.layout.tensor):
            # Listed already: a list takes an operation for each of its ranks.
            experts = {"etp": peers["tp"], "ep": (self.rank,), "edp": peers["dense_gradients"]}
        else:
            experts = self.layout.expert_peers(self.rank)
        return {**peers, **experts, "tied": ends if self.rank in ends else (self.rank,)}

    def experts(self, shape: ModelShape) -> range:
        """Return the experts of each layer that this rank holds; empty without experts."""
        number = shape.experts.num_experts if isinstance(shape, MixtureShape) and shape.experts else 0
        ranks = self.peers["ep"]
        return balanced_split(number, len(ranks))[ranks.index(self.rank)]

    def parameters(self, shape: ModelShape, split: PipelineSplit) -> tuple[Parameter, ...]:
        """Return the registered parameters of this rank's stage, in forward order."""
        return tuple(stage_parameters(shape, split, self.at.pp, self.experts(shape)))

    def cut(self, parameter: Parameter) -> tuple[int, int]:
        """Return this rank's index among the ranks over which a parameter is cut, and their number."""
        ranks = self.peers[parameter.spec.axis]
        return ranks.index(self.rank), len(ranks)

    def slices(self, parameter: Parameter) -> tuple[tuple[Part, TensorSlice], ...]:
        """Return each part of a parameter with this rank's slice, in the order of the parameter's dim 0."""
        return parameter.spec.slices(*self.cut(parameter))

    def rows(self, parameter: Parameter) -> list[int]:
        """Return the length along dim 0 of this rank's slice of each part."""
        return [region.shape[0] for _, region in self.slices(parameter)]

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of the registered parameter on this rank."""
        return parameter.spec.local_shape(*self.cut(parameter))

    def is_shared(self, parameter: Parameter, part: Part) -> bool:
        """Return whether several ranks hold the same slice of a sharded part: it has fewer heads than ranks."""
        return parameter.spec.is_shared(part, self.cut(parameter)[1])

    def is_first_holder(self, parameter: Parameter, part: Part) -> bool:
        """Return whether no rank before this one, of those over which a parameter is cut, holds the same slice."""
        index, size = self.cut(parameter)
        return parameter.spec.first_holder(part, index, size) == index

    def is_first_stage(self, parameter: Parameter) -> bool:
        """Return whether this rank's stage is the first, or the only one, that holds a parameter."""
        return not parameter.spec.stages or self.at.pp == parameter.spec.stages[0]

    def is_counted(self, parameter: Parameter) -> bool:
        """Return whether this rank's copy counts: whole ones on the first rank, tied weights on their first stage.

        Key-value heads shared by ranks need no rule: all ranks but the first hold zeros as their gradient.
        """
        return (parameter.spec.dim is not None or self.cut(parameter)[0] == 0) and self.is_first_stage(
            parameter
        )

    def writes(self, parameter: Parameter, turn: int) -> bool:
        """Return whether this rank writes its shard of a parameter: ranks with the same shard take turns."""
        copies = self.peers[COPIES[parameter.spec.axis]]
        return copies[turn % len(copies)] == self.rank

    @property
    def counts_samples(self) -> bool:
        """Whether what this rank knows of whole samples counts in a sum over the world.

        Ranks that differ on another axis than those of the role "batch", and in their stage, have the same samples.
        """
        return self.peers["batch"][0] in self.layout.peers(0, "pp")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count in a sum over the world.

        Ranks that differ on another axis than those of the role "loss", and in their stage, have the same tokens.
        """
        return self.peers["loss"][0] in self.layout.peers(0, "pp")
