"""What the checkpoint needs from an optimizer, whoever implements it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megalite.topology.parameters import Parameter

WEIGHT = "weight"
"""Kind of the weights that the model computes with."""
MASTER = "master"
"""Kind of state: the weights themselves in float32, beside those of a 16-bit model."""
EMA = "ema"
"""Kind of state: an exponential moving average of the weights."""


@dataclass(frozen=True)
class StateShard:
    """A run of one registered parameter's optimizer state on this rank.

    parameter: the registered parameter (its spec says which canonical tensors it is made of).
    key: the kind of state: "exp_avg", "exp_avg_sq", MASTER, EMA, WEIGHT, ...
    start: first element of the run in the *flattened local shard* of the registered parameter.
    values: one-dimensional tensor of the run's elements; a view where possible, so that load can write into it.
    owned: False where another data-parallel rank holds the same run and writes it; loading fills every run.
    """

    parameter: Parameter
    key: str
    start: int
    values: Any
    owned: bool = True


class OptimizerState(Protocol):
    """The optimizer's state as named runs of elements, each element owned by exactly one data-parallel rank."""

    def weights(self) -> Iterable[StateShard] | None:
        """The runs of the model's weights that this rank holds where data-parallel ranks share them; None where the
        stage's parameters hold them whole. Saving and loading use them as they use those of `shards`."""
        ...

    def shards(self) -> Iterator[StateShard]:
        """The runs that this rank holds; saving writes the owned ones, loading copies into `values` of all."""
        ...

    def scalars(self) -> Mapping[str, Any]:
        """JSON values that are equal on every rank: step counts, loss scale."""
        ...

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Take over what was copied into `shards()` and these scalars; must be called on every rank."""
        ...


class NoOptimizer:
    """The state of a model that was not trained here: weights alone."""

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        yield from ()

    def scalars(self) -> dict[str, Any]:
        return {}

    def load(self, scalars: Mapping[str, Any]) -> None:
        pass
