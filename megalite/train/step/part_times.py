"""The times of the parts of a training step on this rank, while all ranks of a group measure the same."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn

from megalite.config.load import load_run
from megalite.config.sections.schema import OptimizerConfig, RunConfig
from megalite.config.sections.training_section import ComputeSettings
from megalite.data.batches.loader import StepLoader
from megalite.model.options import ModelOptions
from megalite.model.replica import Replica
from megalite.parallel.collectives import Pending, all_reduce, broadcast, start_gather, start_reduce_scatter
from megalite.parallel.gradient_sums import WeightGradients
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.parallel.step_batch import StepBatch
from megalite.planner.calibration import (
    AttentionTime,
    LinkKind,
    LinkTime,
    ModelTime,
    ProbeModel,
    ProductTime,
    UpdateTime,
    WholeStepTime,
)
from megalite.selftest.clock import device_seconds
from megalite.selftest.decide import KernelChoice
from megalite.topology.stages import pipeline_split
from megalite.train.assemble import TrainingPlan, assemble
from megalite.train.optimizer.protocol import Optimizer
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.update import accumulate_in_float32
from megalite.train.step.calibration_probes import step_settings
from megalite.train.step.precision import DTYPES
from megalite.train.step.train_step import TrainStep

_LEAST, _MOST = 3, 40
_SECONDS = 0.04
"""In all of its rounds a part is timed for about so long, and at least _LEAST times."""
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class RankClock:
    """Times works on all ranks of a mesh at once: the median of the faster half, of which the mean over the ranks.

    Other processes of a machine only ever make a work slower. rounds: how often every part of a calibration is timed.
    """

    mesh: ParallelMesh
    rounds: int = 1

    def seconds(self, *works: Callable[[], Any], held: bool = False) -> list[float]:
        """Return the seconds of each of the works, which run one after the other, again and again. Collective.

        held: an accelerator begins with a work once all of its launches are queued.
        """
        for work in works:
            work()  # what the first call alone does
        first = [self._once(work, held=held) for work in works]
        longest = self.mesh.max_over_world(sum(first))
        self.mesh.barrier()
        count = max(ceil(_LEAST / self.rounds), min(_MOST, int(_SECONDS / self.rounds / longest)))
        series = [first, *([self._once(work, held=held) for work in works] for _ in range(count - 1))]
        medians = [statistics.median(sorted(times)[: count // 2 + 1]) for times in zip(*series, strict=True)]
        return [total / self.mesh.layout.world_size for total in self.mesh.sum_over_world(medians)]

    def _once(self, work: Callable[[], Any], *, held: bool) -> float:
        device = self.mesh.device
        if device.type == "cpu":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        if held:
            return device_seconds(work, device)
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        return time.perf_counter() - started


class PartTimes:
    """Measures the parts in one precision. Every rank of the clock's mesh makes one and calls it alike.

    shared: the ranks of a tensor axis share the models; else each rank has its own.
    """

    def __init__(self, clock: RankClock, precision: str, kernels: KernelChoice, *, shared: bool = False):
        mesh = clock.mesh
        self.precision, self.kernels = precision, kernels
        self.mesh, self.device, self.dtype = mesh, mesh.device, DTYPES[precision]
        self.clock, self.alone_mesh = clock, ParallelMesh.single(mesh.device)
        self.model_mesh = mesh if shared else self.alone_mesh

    def product(self, tokens: int, inputs: int, outputs: int) -> ProductTime:
        hidden, grad = self._drawn(tokens, inputs), self._drawn(tokens, outputs)
        weight = nn.Parameter(self._drawn(outputs, inputs))
        accumulate_in_float32({"weight": weight})
        gradients = WeightGradients(self.kernels.operators.accumulate)

        def of_weight() -> None:
            gradients.of_product(weight, grad, lambda: hidden)

        with torch.no_grad():
            works = (lambda: nn.functional.linear(hidden, weight), lambda: grad @ weight, of_weight)
            return ProductTime(tokens, inputs, outputs, *self.clock.seconds(*works, held=True))

    def attention(self, rows: int, length: int, heads: int, head_dim: int) -> AttentionTime:
        query, key, value = (self._drawn(rows, length, heads, head_dim).requires_grad_() for _ in range(3))
        grad = torch.randn_like(query)
        made: list[Tensor] = []

        def forward() -> None:
            made[:] = [self.kernels.operators.attend(query, key, value)]

        def backward() -> None:
            torch.autograd.grad(made, (query, key, value), grad.view_as(made[0]))

        return AttentionTime(rows, length, heads, head_dim, *self.clock.seconds(forward, backward, held=True))

    def model(self, model: ProbeModel) -> ModelTime:
        replica, _, _ = self._assembled(model)
        chunk = replica.stage.chunks[0]
        loss_dtype = torch.promote_types(self.dtype, torch.float32)
        batch = random_batch(model.rows, model.length, model.vocabulary, dtype=loss_dtype).map(
            lambda tensor: tensor.to(self.device)
        )
        made: list[Tensor] = []

        def forward() -> None:
            made[:] = [chunk(batch.input_ids, batch=batch).mean()]

        return ModelTime(model, *self.clock.seconds(forward, lambda: made[0].backward()))

    def update(self, model: ProbeModel, optimizer: str) -> UpdateTime:
        replica, chosen, _ = self._assembled(model, optimizer)
        tensors = replica.trained_tensors
        gradients = {
            name: torch.full_like(tensor, 1e-3, dtype=torch.promote_types(self.dtype, torch.float32))
            for name, tensor in tensors.items()
        }

        def give() -> None:
            for name, tensor in tensors.items():
                tensor.grad = gradients[name]

        def update() -> None:
            chosen.step(_LEARNING_RATE, float(chosen.squared_norm()))

        values = sum(tensor.numel() for tensor in tensors.values())
        return UpdateTime(optimizer, values, len(tensors), self.clock.seconds(give, update)[1])

    def whole_step(self, model: ProbeModel, micro_batches: int, zero: int) -> WholeStepTime:
        settings = step_settings(model, micro_batches, zero, self.mesh.layout.world_size)
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        config = load_run(None, [*flags, "--training.precision", self.precision]).config
        loader = cast(StepLoader, RandomLoader(config, self.mesh))
        step = TrainStep(config, self.mesh, model.shape, loader, kernels=self.kernels)
        with step.batches:
            return WholeStepTime(model, micro_batches, zero, *self.clock.seconds(step.train_step))

    def alone(self, model: ProbeModel) -> float:
        """Return the pace of rank 0 while the other ranks wait, in units of its pace while all compute."""
        both = self.model(model)
        seconds = both.forward + both.backward
        if self.mesh.rank == 0:
            alone = PartTimes(RankClock(self.alone_mesh, self.clock.rounds), self.precision, self.kernels)
            alone_time = alone.model(model)
            seconds = alone_time.forward + alone_time.backward
        self.mesh.barrier()
        return (both.forward + both.backward) / float(self.mesh.broadcast_object(seconds))

    def _drawn(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.dtype, device=self.device)

    def _assembled(self, model: ProbeModel, optimizer: str = "adamw") -> tuple[Replica, Optimizer, Any]:
        training = ComputeSettings(recompute="selective" if model.recomputed else "none")
        plan = TrainingPlan(
            model.shape,
            pipeline_split(model.layers),
            ModelOptions(self.dtype, training=training, operators=self.kernels.operators),
            OptimizerSettings(OptimizerConfig(name=optimizer)),
        )
        return assemble(plan, self.model_mesh, seed=0)


class RandomLoader:
    """Gives this rank's rows of a global batch of random ids."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh):
        self._config, self._mesh = config, mesh

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        plan, length = self._config.batch, self._config.training.sequence_length
        count = plan.global_batch_size // plan.data
        return random_batch(count, length, int(self._config.model.vocab_size), dtype=dtype)


def random_batch(rows: int, length: int, vocabulary: int, *, dtype: torch.dtype) -> StepBatch:
    ids = torch.randint(vocabulary, (rows, length))
    positions = torch.arange(length).repeat(rows, 1)
    mask = torch.ones(ids.shape, dtype=dtype)
    return StepBatch(ids, positions, ids.roll(-1, dims=1), mask, torch.arange(rows))


def link_times(clock: RankClock, sizes: Sequence[int]) -> Iterator[LinkTime]:
    """Yield the times of collectives over the mesh's tensor axis; a message is a broadcast in a group of two."""
    mesh, group = clock.mesh, clock.mesh.tp
    for size in sizes:
        whole = torch.zeros(1, group.size, max(1, size // 4 // group.size), device=mesh.device)
        part = whole[:, :1].contiguous()
        works: dict[LinkKind, Callable[[], Any]] = {
            "all_reduce": partial(all_reduce, whole, group),
            "all_gather": partial(_finished, start_gather, part, group),
            "reduce_scatter": partial(_finished, start_reduce_scatter, whole, group),
        }
        if group.size == 2:
            works["message"] = partial(broadcast, whole, group, 0)
        for kind, work in works.items():
            yield LinkTime(kind, size, *clock.seconds(work))


def _finished(start: Callable[..., Pending], values: Tensor, group: RankGroup) -> Tensor:
    return start(values, group)()
