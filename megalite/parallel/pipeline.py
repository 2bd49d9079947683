"""Runs the micro batches of one step through the stages: torch.distributed.pipelining, or the plain loop at pp = 1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from megalite.parallel.collectives import all_reduce
from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.mesh import ParallelMesh

_EXECUTORS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class StepBatch:
    """What one data-parallel rank works on in one step: M micro batches of b sequences, stacked, [M * b, S] each."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor

    def micro_batches(self, count: int) -> list["StepBatch"]:
        pieces = (
            tensor.chunk(count) for tensor in (self.input_ids, self.position_ids, self.labels, self.loss_mask)
        )
        return [StepBatch(*piece) for piece in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class PipelineShapes:
    """The static shapes of a runner: M micro batches of [b, S], and hidden states [b, S, H] between stages."""

    micro_batches: int
    micro_batch_size: int
    sequence_length: int
    hidden_size: int
    dtype: torch.dtype


class PipelineRunner(Protocol):
    """Forward and backward of one global batch; leaves gradients to be averaged over dp in `.grad`."""

    def forward_backward(self, batch: StepBatch) -> float:
        """The loss of the step: the mean over every counted token of the global batch, on every rank."""
        ...


def pipeline_runner(
    stage: nn.Module,
    mesh: ParallelMesh,
    shapes: PipelineShapes,
    *,
    schedule: str,
    forward: Callable[..., Tensor] | None = None,
) -> PipelineRunner:
    """The runner for this mesh. `forward` stands for the module's call at pp = 1 (an engine's forward)."""
    if mesh.pp.size == 1:
        return _LoopRunner(forward or stage, mesh, shapes)
    return _ScheduleRunner(stage, mesh, shapes, schedule)


class _LoopRunner:
    """Gradient accumulation: the one-stage schedule."""

    def __init__(self, forward: Callable[..., Tensor], mesh: ParallelMesh, shapes: PipelineShapes):
        self._forward, self._mesh, self._shapes = forward, mesh, shapes

    def forward_backward(self, batch: StepBatch) -> float:
        scale = _loss_scale(batch, self._mesh)
        total = 0.0
        for micro_batch in batch.micro_batches(self._shapes.micro_batches):
            losses = self._forward(micro_batch.input_ids, **_stage_arguments(micro_batch))
            loss = losses.sum() * scale
            loss.backward()
            total += loss.item()
        return _mean_over_replicas(total, self._mesh)


class _ScheduleRunner:
    """One stage of several, driven by a schedule of torch.distributed.pipelining."""

    def __init__(self, stage: nn.Module, mesh: ParallelMesh, shapes: PipelineShapes, schedule: str):
        self._mesh = mesh
        self._scale = 0.0
        self._schedule = _EXECUTORS[schedule](
            _pipeline_stage(stage, mesh, shapes),
            n_microbatches=shapes.micro_batches,
            loss_fn=lambda losses, _labels: losses.sum() * self._scale,
            # The loss is scaled once, by the global count of tokens; torch must not divide again.
            scale_grads=False,
        )

    def forward_backward(self, batch: StepBatch) -> float:
        self._scale = _loss_scale(batch, self._mesh)
        inputs = (batch.input_ids,) if self._mesh.at.pp == 0 else ()
        target = batch.labels if self._mesh.is_last_stage else None
        losses: list[Tensor] = []
        self._schedule.step(
            *inputs, target=target, losses=losses, return_outputs=False, **_stage_arguments(batch)
        )
        return _mean_over_replicas(sum(loss.item() for loss in losses), self._mesh)


def _pipeline_stage(stage: nn.Module, mesh: ParallelMesh, shapes: PipelineShapes) -> PipelineStage:
    # With both shapes given, torch runs no extra forward and backward to find them out.
    tokens = (shapes.micro_batch_size, shapes.sequence_length)
    hidden = torch.empty(*tokens, shapes.hidden_size, dtype=shapes.dtype, device="meta", requires_grad=True)
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    losses = torch.empty(shapes.micro_batch_size, dtype=shapes.dtype, device="meta", requires_grad=True)
    return PipelineStage(
        stage,
        mesh.at.pp,
        mesh.pp.size,
        mesh.device,
        input_args=ids if mesh.at.pp == 0 else hidden,
        output_args=losses if mesh.is_last_stage else hidden,
        group=mesh.pp.group,
    )


def _stage_arguments(batch: StepBatch) -> dict[str, Any]:
    return {"position_ids": batch.position_ids, "labels": batch.labels, "loss_mask": batch.loss_mask}


def _loss_scale(batch: StepBatch, mesh: ParallelMesh) -> float:
    """dp size over the weight of all tokens of the global batch: with gradients averaged over dp, any split of
    the batch gives the gradient of the same mean."""
    weight = batch.loss_mask.double().masked_fill(batch.labels == IGNORE_INDEX, 0).sum()
    total = all_reduce(weight, mesh.dp, dist.ReduceOp.SUM).item()
    return mesh.dp.size / total if total > 0 else 0.0


def _mean_over_replicas(loss: float, mesh: ParallelMesh) -> float:
    """From each rank's scaled loss (zero off the last stage) to the one loss of the step."""
    counted = loss if mesh.is_last_stage and mesh.tp.rank == 0 else 0.0
    return mesh.sum_over_world([counted])[0] / mesh.dp.size
