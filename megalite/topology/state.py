"""The optimizer state as checkpoints see it, the same for every optimizer implementation."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megalite.topology.parameters import Parameter, model_parameters, trained_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import Part

WEIGHT = "weight"
"""State key of the weights that the model computes with."""
MASTER = "master"
"""State key of the fp32 master weights of a bf16 or fp16 model."""
EMA = "ema"
"""State key of the exponential moving average of the weights."""
MOMENTUM = "momentum_buffer"
"""State key of the momentum of SGD and Muon."""
FIRST_MOMENT, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
"""State keys of AdamW; Lion has the first."""
ROW_MOMENT, COLUMN_MOMENT, VECTOR_MOMENT = "row_var", "col_var", "variance"
"""State keys of Adafactor: second moments of a matrix's rows [rows, 1] and columns [1, columns], and of a vector."""


def state_parameter(parameter: Parameter, key: str) -> Parameter:
    """Return how the state of a parameter is shaped and cut: like the parameter itself, but for rows and columns.

    The moments of rows and columns are cut where these are: those of a matrix that is split by rows are split for its
    rows, and the same on every rank for its columns.
    """
    if key not in (ROW_MOMENT, COLUMN_MOMENT):
        return parameter
    spec, kept = parameter.spec, 0 if key == ROW_MOMENT else 1
    split = spec.dim == kept
    parts = tuple(
        Part(each.name, _moment(each.shape, kept), each.heads if split else None) for each in spec.parts
    )
    return replace(parameter, spec=replace(spec, parts=parts, dim=kept if split else None))


def _moment(shape: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """Return the shape of the moment of a matrix's rows (`kept` 0) or columns (1)."""
    rows, columns = shape
    return (rows, 1) if kept == 0 else (1, columns)


def state_tensors(shape: ModelShape, keys: Collection[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each of an optimizer's state keys, the canonical tensors that have such a state, with its shape.

    keys: all state keys of the optimizer: with momentum and moments it is Muon, whose matrices have momentum and whose
    other tensors have moments. Adafactor has other keys for matrices than for vectors.
    """
    tensors = trained_tensors(shape)
    found = {key: dict(tensors) for key in keys}
    if {MOMENTUM, FIRST_MOMENT} <= set(keys):
        matrices = {
            part.name
            for each in model_parameters(shape)
            if each.is_hidden_matrix and each.trained
            for part in each.spec.parts
        }
        for key in {MOMENTUM, FIRST_MOMENT, SECOND_MOMENT} & set(keys):
            held = matrices if key == MOMENTUM else tensors.keys() - matrices
            found[key] = {name: size for name, size in tensors.items() if name in held}
    for key, dims in ((ROW_MOMENT, 2), (COLUMN_MOMENT, 2), (VECTOR_MOMENT, 1)):
        if key in found:
            found[key] = {name: size for name, size in tensors.items() if len(size) == dims}
    for kept, key in enumerate((ROW_MOMENT, COLUMN_MOMENT)):
        if key in found:
            found[key] = {name: _moment(size, kept) for name, size in found[key].items()}
    return found


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


class NoOptimizer:
    """The state of a model without an optimizer: weights only."""

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        yield from ()

    def scalars(self) -> dict[str, Any]:
        return {}

    def load(self, scalars: Mapping[str, Any]) -> None:
        pass
