"""Weights of any source: a `WeightReader` gives regions of canonical tensors, `fill` a stage what it holds of them."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megalite.checkpoint.failures import explain
from megalite.checkpoint.regions import rows_of, split_flat_range
from megalite.errors import CheckpointError, listed
from megalite.model.replica import Replica
from megalite.parallel.int8 import Int8Weight
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.parameters import Parameter
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import WEIGHT, StateShard

BLOCK_ELEMENTS = 4 << 20
"""Elements per block where a tensor is read in blocks of rows."""
INT8_SCALE = "scale"
"""The state key of the scales [rows, 1] of int8 weights."""


@dataclass(frozen=True)
class TensorTarget:
    """A tensor to fill with the elements `start` to `start + values.numel()` of a flattened region of a tensor.

    values: one-dimensional and contiguous, of any dtype and on any device.
    """

    values: Tensor
    state_key: str
    name: str
    region: TensorSlice
    start: int = 0


class WeightReader(ABC):
    """Canonical tensors of one source. Its files are open until the end of the `with` block."""

    block_elements = BLOCK_ELEMENTS
    """How many elements, about, `fill_all` reads at a time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor in the source's dtype; raises CheckpointError.

        state_key: WEIGHT, or another state that the source holds of the tensor.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @torch.no_grad()
    def fill_all(self, targets: Iterable[TensorTarget]) -> None:
        """Fill many tensors, each with its whole region; raises CheckpointError."""
        for target in targets:
            first = 0
            for block in rows_of(target.region, self.block_elements):
                if block.numel:
                    values = target.values[first : first + block.numel].view(block.shape)
                    values.copy_(self.read(target.state_key, target.name, block))
                first += block.numel


def fill(
    replica: Replica,
    weights: AbstractContextManager[WeightReader],
    path: Path,
    parameters: Sequence[Parameter] | None = None,
) -> None:
    """Fill this rank's stage from weights of any source; every rank reads the regions that it holds. Collective.

    weights: opened here, so that ranks which cannot open them are heard of too (`convert/weights.py`). path: where they
    are. parameters: those to fill; None: all of the stage. Raises CheckpointError, on every rank alike, when the
    weights are missing or damaged, or are not exactly those of the model; then the stage may be filled in part.
    """

    def load() -> None:
        with weights as reader:
            reader.fill_all(_targets_of(replica, replica.parameters if parameters is None else parameters))

    all_or_none(replica.mesh, load, explain(replica.mesh, "load", path))


def require_no_others(
    path: Path,
    missing: Collection[str],
    extra: Collection[str],
    advice: str,
    lacking: str = "the model of its config.json lacks",
) -> None:
    """Raise CheckpointError if a source lacks tensors of the model, or has others, with their names.

    advice: what to do. lacking: says of the others who does not have them.
    """
    parts = [f"lacks {listed(sorted(missing))}"] if missing else []
    parts += [f"has {listed(sorted(extra))}, which {lacking}"] if extra else []
    if parts:
        raise CheckpointError(f"{path} {' and '.join(parts)}; {advice}")


def _targets_of(replica: Replica, parameters: Sequence[Parameter]) -> Iterator[TensorTarget]:
    """Yield the targets of parameters; each is set once the reader has taken all of its own."""
    tensors, mesh = replica.tensors, replica.mesh
    modules = replica.stage.named_modules()
    int8 = {f"{name}.weight": module for name, module in modules if isinstance(module, Int8Weight)}
    for parameter in parameters:
        linear = int8.get(parameter.name)
        yield from targets(parameter, tensors[parameter.name] if linear is None else linear.weight, mesh)
        if linear is not None:
            for part, region, scale in mesh.parts_of(parameter, linear.scale):
                rows = TensorSlice((region.offsets[0], 0), (region.shape[0], 1))
                yield TensorTarget(scale.view(-1), INT8_SCALE, part.name, rows)
        replica.unset.discard(parameter.name)


def targets(parameter: Parameter, tensor: Tensor, mesh: ParallelMesh) -> Iterator[TensorTarget]:
    """Yield the parts of a parameter of this rank, which `tensor` holds."""
    return shard_targets(StateShard(parameter, WEIGHT, 0, tensor.detach().view(-1)), WEIGHT, mesh)


def shard_targets(shard: StateShard, state_key: str, mesh: ParallelMesh) -> Iterator[TensorTarget]:
    """Yield the parts of a flat range of one parameter: all of its elements, each once."""
    size = shard.values.numel()
    filled = 0
    for overlap in split_flat_range(mesh.slices(shard.parameter), shard.start, size):
        values = shard.values[overlap.offset : overlap.offset + overlap.numel]
        filled += overlap.numel
        yield TensorTarget(values, state_key, overlap.part.name, overlap.region, overlap.start)
    if filled != size:
        raise AssertionError(f"{shard.key} of {shard.parameter.name}: {filled} of {size} elements are loaded")
