"""Every rank of a layout as a thread of this process, with tensors whose every element is known."""

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.regions import index_in
from megalite.checkpoint.weights import fill
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.parameters import Parameter, canonical_tensors, stage_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice
from megalite.topology.stages import PipelineSplit, pipeline_split
from megalite.topology.state import StateShard
from tests.support.checkpoints import save_checkpoint
from tests.support.waiting import PATIENCE

T = TypeVar("T")
KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ThreadMesh(ParallelMesh):
    """The mesh of one rank of a world of threads, without process groups."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    exchange: "Exchange" = field(default_factory=lambda: Exchange(1))

    def gather_objects(self, value: Any) -> list[Any] | None:
        gathered = self.exchange.all(self.rank, value)
        return gathered if self.rank == 0 else None

    def broadcast_object(self, value: Any) -> Any:
        return self.exchange.all(self.rank, value)[0]

    def max_over_world(self, value: float) -> float:
        return max(self.exchange.all(self.rank, value))


class Exchange:
    """A place where all threads leave a value and take everyone's."""

    def __init__(self, size: int):
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def all(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()


def on_all_ranks(layout: Layout, action: Callable[[ThreadMesh], T]) -> list[T | Exception]:
    """What `action` returned or raised on each rank of the layout."""
    exchange = Exchange(layout.world_size)
    outcomes: list[Any] = [None] * layout.world_size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = action(ThreadMesh(layout, rank, exchange=exchange))
        except Exception as error:
            outcomes[rank] = error
            if (
                not isinstance(error, threading.BrokenBarrierError)
                and type(error).__name__ != "CheckpointError"
            ):
                exchange.abort()

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(layout.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@cache
def truth(shape: ModelShape, kind: str, name: str, *, version: int = 0) -> Tensor:
    """The full tensor of that kind and canonical name: different for each of them."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{version}/{kind}/{name}".encode()))
    return torch.randn(canonical_tensors(shape)[name], generator=generator)


def local_truth(shape: ModelShape, kind: str, parameter: Parameter, mesh: ThreadMesh, version: int) -> Tensor:
    """Return this rank's shard of a registered parameter, cut from the full tensors."""
    pieces = [
        truth(shape, kind, part.name, version=version)[
            index_in(region, TensorSlice((0,) * len(part.shape), part.shape))
        ]
        for part, region in mesh.slices(parameter)
    ]
    return torch.cat(pieces)


@dataclass
class HeldStage:
    """The parameters of one rank's stage."""

    tensors: dict[str, Tensor]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        yield from ()


@dataclass
class HeldState:
    """Optimizer state of one rank: `cuts` None holds everything, as the torch optimizer; otherwise the run of the
    stage's flattened parameters between this rank's cuts, as ZeRO."""

    parameters: Sequence[Parameter]
    locals: Mapping[tuple[str, str], Tensor]
    mesh: ThreadMesh
    cuts: Sequence[float] | None
    loaded: dict[str, Any] = field(default_factory=dict)

    def weights(self) -> None:
        return None

    def shards(self) -> Iterator[StateShard]:
        sizes = [prod(self.mesh.local_shape(parameter)) for parameter in self.parameters]
        low, high = self._partition(sum(sizes))
        first = 0
        for index, (parameter, size) in enumerate(zip(self.parameters, sizes, strict=True)):
            start, stop = max(low, first) - first, min(high, first + size) - first
            owned = self.cuts is not None or index % self.mesh.layout.data == self.mesh.at.dp
            if start < stop:
                for kind in KINDS:
                    values = self.locals[kind, parameter.name].view(-1)[start:stop]
                    yield StateShard(parameter, kind, start, values, owned)
            first += size

    def scalars(self) -> dict[str, Any]:
        return {"step": 7.0}

    def load(self, scalars: Mapping[str, Any]) -> None:
        self.loaded = dict(scalars)

    def _partition(self, total: int) -> tuple[int, int]:
        if self.cuts is None:
            return 0, total
        data, rank = self.mesh.layout.data, self.mesh.at.dp
        bounds = [0, *(round(cut * total) for cut in sorted(self.cuts)[: data - 1]), total]
        return bounds[rank], bounds[rank + 1]


@dataclass(frozen=True)
class World:
    """A layout with its stages and the way it partitions optimizer state."""

    shape: ModelShape
    layout: Layout
    given: tuple[int, ...] | None = None
    cuts: tuple[float, ...] | None = None

    @property
    def split(self) -> PipelineSplit:
        return pipeline_split(self.shape.num_hidden_layers, self.layout.pipeline, layers_per_chunk=self.given)

    def parameters(self, mesh: ThreadMesh) -> list[Parameter]:
        return list(stage_parameters(self.shape, self.split, mesh.at.pp))

    def replica(self, mesh: ThreadMesh, stage: HeldStage) -> Replica:
        return Replica(self.shape, self.split, mesh, stage)  # type: ignore[arg-type]

    def held(self, mesh: ThreadMesh, *, version: int | None) -> tuple[HeldStage, HeldState]:
        """This rank's stage and state with the true values; version None: filled with nan, to be loaded."""
        parameters = self.parameters(mesh)

        def local(kind: str, parameter: Parameter) -> Tensor:
            if version is None:
                return torch.full(mesh.local_shape(parameter), torch.nan)
            return local_truth(self.shape, kind, parameter, mesh, version)

        stage = HeldStage({parameter.name: local("weight", parameter) for parameter in parameters})
        states = {(kind, p.name): local(kind, p) for kind in KINDS for p in parameters}
        return stage, HeldState(parameters, states, mesh, self.cuts)

    def save(self, folder: Path, *, step: int = 100, version: int = 0) -> list[Any]:
        """Save on all ranks; the path or the exception of each."""

        def action(mesh: ThreadMesh) -> Path:
            stage, state = self.held(mesh, version=version)
            return save_checkpoint(
                folder,
                self.replica(mesh, stage),
                state,
                trainer_state={"step": step, "samples": 8 * step, "tokens": 96 * step},
                config={"run": {"seed": 1}},
            )

        return on_all_ranks(self.layout, action)

    def load(self, checkpoint: Path, *, with_optimizer: bool = True) -> list[Any]:
        """Load on all ranks; (mesh, stage, state, manifest) or the exception of each."""

        def action(mesh: ThreadMesh) -> Any:
            stage, state = self.held(mesh, version=None)
            replica = self.replica(mesh, stage)
            if with_optimizer:
                load_checkpoint(checkpoint, replica, state)
            else:
                fill(replica, open_weights(WeightSource(checkpoint, "checkpoint", self.shape)), checkpoint)
            return mesh, stage, state, read_manifest(checkpoint)

        return on_all_ranks(self.layout, action)

    def assert_loaded(self, outcomes: Sequence[Any], *, version: int = 0) -> None:
        """Every element of every rank is bit for bit the true one."""
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            mesh, stage, state, _ = outcome
            for parameter in self.parameters(mesh):
                expected = local_truth(self.shape, "weight", parameter, mesh, version)
                assert torch.equal(stage.tensors[parameter.name], expected), parameter.name
            for shard in state.shards():
                whole = local_truth(self.shape, shard.key, shard.parameter, mesh, version).view(-1)
                expected = whole[shard.start : shard.start + shard.values.numel()]
                assert torch.equal(shard.values, expected), (shard.key, shard.parameter.name)
            assert state.loaded == {"step": 7.0}
