"""How many values of the parameters, of the trained ones and of the optimizer's state a rank of each stage has."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megalite.config.sections.schema import OptimizerConfig
from megalite.planner.planned_run import PlannedRun
from megalite.topology.axes import Layout
from megalite.topology.experts import EXPERT_AXIS, MixtureShape
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import Parameter, alike, layer_parameters, stage_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit

# The settings of [optimizer] that decide what it keeps: name, momentum, whether it averages the weights.
_Kept = tuple[str, float | None, bool]


@dataclass(frozen=True)
class ValueCounts:
    """Numbers of values on one rank. weights: of all parameters; trained: of trained ones; state: of the optimizer.

    experts: the share of them that belongs to experts, which fewer ranks hold copies of.
    """

    weights: int = 0
    trained: int = 0
    state: int = 0
    experts: "ValueCounts | None" = None

    def __add__(self, other: "ValueCounts") -> "ValueCounts":
        experts = (
            self.experts + other.experts if self.experts and other.experts else self.experts or other.experts
        )
        return ValueCounts(
            self.weights + other.weights, self.trained + other.trained, self.state + other.state, experts
        )

    def times(self, number: int) -> "ValueCounts":
        experts = self.experts and self.experts.times(number)
        return ValueCounts(number * self.weights, number * self.trained, number * self.state, experts)


class ZeroShares(NamedTuple):
    """The values that a rank keeps of each kind. updated: of those trained that its own optimizer updates."""

    weights: float
    gradients: float
    updated: float
    state: float

    @classmethod
    def of(cls, run: PlannedRun, counts: ValueCounts) -> "ZeroShares":
        """Return what the run's ZeRO stage leaves; it partitions over the ranks with equal copies."""

        def share(values: int, of_experts: int, from_stage: int) -> float:
            if run.zero_stage < from_stage:
                return values
            return (values - of_experts) / run.copies + of_experts / run.expert_copies

        experts = counts.experts or ValueCounts()
        return cls(
            share(counts.weights, experts.weights, 3),
            share(counts.trained, experts.trained, 2),
            share(counts.trained, experts.trained, 1),
            share(counts.state, experts.state, 1),
        )


def stage_counts(run: PlannedRun, stage: int) -> ValueCounts:
    """Return the values on the first rank of a stage, which holds as many as any rank of it."""
    kept, tensor = _kept(run.optimizer), run.layout.tensor
    chunks, last = run.split.chunks_of(stage), len(run.split.layers) - 1
    counts = _ends(run.shape, (0 in chunks, last in chunks), tensor, kept)
    for chunk in chunks:
        counts += chunk_counts(run, chunk)
    return counts


def chunk_counts(run: PlannedRun, chunk: int) -> ValueCounts:
    """Return the values of the decoder layers of a chunk on the first rank of its stage."""
    kept, layers = _kept(run.optimizer), run.split.layers[chunk]
    ranks = (run.layout.tensor, run.layout.expert, run.cut_of_experts)
    if run.shape.adapter is None and not isinstance(run.shape, MixtureShape):
        return _layer_counts(run.shape, 0, ranks, kept).times(len(layers))
    counts = ValueCounts()
    # An adapter may name single layers, and a mixture has two kinds.
    for layer, number in _numbers(run.shape, layers).items():
        counts += _layer_counts(run.shape, layer, ranks, kept).times(number)
    return counts


@lru_cache(maxsize=1024)
def _numbers(shape: ModelShape, layers: range) -> Counter[int]:
    """Return the first layer of each kind -> the number of layers like it."""
    return Counter(alike(shape, layer) for layer in layers)


def _kept(optimizer: OptimizerConfig) -> _Kept:
    return optimizer.name, optimizer.momentum, bool(optimizer.ema_decay)


@lru_cache(maxsize=4096)
def _layer_counts(shape: ModelShape, layer: int, ranks: tuple[int, int, int], kept: _Kept) -> ValueCounts:
    """Return the values of a decoder layer on the first rank. ranks: of tensor, expert, expert tensor."""
    tensor, expert, expert_tensor = ranks
    # The first rank of those that divide the experts has as many as any.
    held = RankPlace(Layout(data=expert, expert=expert), 0).experts(shape)
    parameters = tuple(layer_parameters(shape, layer, held))
    dense = _counted((each for each in parameters if each.spec.axis != EXPERT_AXIS), tensor, kept)
    # The ranks that share each expert as those of another tensor parallelism.
    stacked = [
        replace(each, spec=replace(each.spec, axis="tp"))
        for each in parameters
        if each.spec.axis == EXPERT_AXIS
    ]
    if not stacked:
        return dense
    experts = _counted(stacked, expert_tensor, kept)
    return replace(dense + experts, experts=experts)


@lru_cache(maxsize=1024)
def _ends(shape: ModelShape, ends: tuple[bool, bool], tensor: int, kept: _Kept) -> ValueCounts:
    """Return the values outside of the layers. ends: whether the stage has the first and the last chunk."""
    # The smallest pipeline, without layers, that has such a stage.
    stages, stage = {(True, True): (1, 0), (True, False): (2, 0), (False, True): (2, 1)}.get(ends, (3, 1))
    split = PipelineSplit((range(0),) * stages, stages)
    return _counted(stage_parameters(shape, split, stage), tensor, kept)


def _counted(parameters: Iterable[Parameter], tensor: int, kept: _Kept) -> ValueCounts:
    place, counts = RankPlace(Layout(tensor=tensor), 0), ValueCounts()
    for parameter in parameters:
        numel = prod(place.local_shape(parameter))
        if parameter.trained:
            counts += ValueCounts(numel, numel, _state_numel(parameter, place, kept))
        else:
            counts += ValueCounts(numel)
    return counts


def _state_numel(parameter: Parameter, place: RankPlace, kept: _Kept) -> int:
    """Return how many values the optimizer keeps for a rank's shard of a parameter."""
    name, momentum, average = kept
    states = OPTIMIZERS[name].states_of(parameter, momentum)
    shards = (*((parameter,) if average else ()), *(state.parameter(parameter) for state in states))
    return sum(prod(place.local_shape(shard)) for shard in shards)
