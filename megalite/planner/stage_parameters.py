"""How many values of the parameters, of the trained ones and of the optimizer's state a rank of each stage has."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megalite.config.sections.schema import OptimizerConfig
from megalite.planner.planned_run import PlannedRun
from megalite.topology.axes import Layout
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import Parameter, layer_parameters, stage_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit

# The settings of [optimizer] that decide what it keeps: name, momentum, whether it averages the weights.
_Kept = tuple[str, float | None, bool]


@dataclass(frozen=True)
class ValueCounts:
    """Numbers of values on one rank. weights: of all parameters; trained: of trained ones; state: of the optimizer."""

    weights: int = 0
    trained: int = 0
    state: int = 0

    def __add__(self, other: "ValueCounts") -> "ValueCounts":
        return ValueCounts(
            self.weights + other.weights, self.trained + other.trained, self.state + other.state
        )

    def times(self, number: int) -> "ValueCounts":
        return ValueCounts(number * self.weights, number * self.trained, number * self.state)


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
    kept, tensor, layers = _kept(run.optimizer), run.layout.tensor, run.split.layers[chunk]
    if run.shape.adapter is None:
        return layer_counts(run.shape, layers[0], tensor, kept).times(len(layers))
    counts = ValueCounts()
    for layer in layers:  # an adapter may name single layers
        counts += layer_counts(run.shape, layer, tensor, kept)
    return counts


def _kept(optimizer: OptimizerConfig) -> _Kept:
    return optimizer.name, optimizer.momentum, bool(optimizer.ema_decay)


def layer_counts(shape: ModelShape, layer: int, tensor: int, kept: _Kept) -> ValueCounts:
    """Return the values of a decoder layer on the first of `tensor` ranks."""
    # Without an adapter all layers are alike.
    return _layer_counts(shape, layer if shape.adapter is not None else 0, tensor, kept)


@lru_cache(maxsize=4096)
def _layer_counts(shape: ModelShape, layer: int, tensor: int, kept: _Kept) -> ValueCounts:
    return _counted(layer_parameters(shape, layer), tensor, kept)


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
