"""The optimizer state as checkpoints see it, the same for every optimizer implementation."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megalite.topology.optimizers import OPTIMIZERS, OptimizerStateKey, states_with
from megalite.topology.parameters import Parameter, model_parameters
from megalite.topology.shape import ModelShape

WEIGHT = "weight"
"""State key of the weights that the model computes with."""
MASTER = "master"
"""State key of the fp32 master weights of a bf16 or fp16 model."""
EMA = "ema"
"""State key of the exponential moving average of the weights."""


def state_parameter(parameter: Parameter, key: str) -> Parameter:
    """Return how the state of a parameter is shaped and cut; a key has one form in every optimizer."""
    every = (state for record in OPTIMIZERS.values() for state in record.state)
    state = next((state for state in every if state.key == key), OptimizerStateKey(key))
    return state.parameter(parameter)


def state_tensors(shape: ModelShape, keys: Collection[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each of a checkpoint's state keys, the canonical tensors that have such a state, with its shape.

    The optimizer is the one that `states_with` finds. A key that it does not have belongs to every trained tensor.
    """
    parameters = model_parameters(shape)
    trained = [parameter for parameter in parameters if parameter.trained]
    states = {state.key: state for state in states_with(set(keys) - {WEIGHT, MASTER, EMA})}
    tensors = {}
    for key in keys:
        state = states.get(key, OptimizerStateKey(key))
        parts = [part for parameter in trained if state.of(parameter) for part in parameter.spec.parts]
        if key == WEIGHT:
            parts += [part for each in parameters if each.by_counts for part in each.spec.parts]
        tensors[key] = {part.name: state.shape(part.shape) for part in parts}
    return tensors


@dataclass(frozen=True)
class StateShard:
    """A flat range of the state of one registered parameter on this rank.

    parameter: the registered parameter; its spec names the canonical tensors that it consists of.
    key: the state key: "exp_avg", "exp_avg_sq", MASTER, EMA, WEIGHT, ...
    start: the first element of the range in the *flattened local shard* of the parameter.
    values: one-dimensional tensor of the elements; a view where possible, so that loading writes in place.
    owned: False where another data-parallel rank has the same range and saves it. Loading fills every range.
    """

    parameter: Parameter
    key: str
    start: int
    values: Any
    owned: bool = True


class OptimizerState(Protocol):
    """An optimizer's state as flat ranges; exactly one data-parallel rank owns each element."""

    def weights(self) -> Iterable[StateShard] | None:
        """The weights of this rank as flat ranges if they are partitioned over data-parallel ranks (ZeRO 3), else None.

        None: the parameters of the stage hold the weights. Saving and loading treat the ranges like those of `shards`.
        """
        ...

    def shards(self) -> Iterator[StateShard]:
        """The flat ranges on this rank; saving writes the owned ones, loading copies into `values` of all."""
        ...

    def scalars(self) -> Mapping[str, Any]:
        """Return JSON values that are equal on every rank: step counts, loss scale."""
        ...

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Apply the values that were copied into `shards()`, and these scalars; called on every rank."""
        ...
