"""Runs the micro batches of one step through the stages: torch.distributed.pipelining, or the plain loop at pp = 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megalite.parallel.collectives import all_reduce
from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.mesh import ParallelMesh

# One chunk a rank, and several.
_SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@dataclass(frozen=True)
class StepBatch:
    """What one data-parallel rank works on in one step: M micro batches of b sequences, stacked, [M * b, S] each.

    samples: [M * b] int64, each row's place in the run's order of samples: equal in every layout, never repeated.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    samples: Tensor

    def micro_batches(self, count: int) -> list["StepBatch"]:
        tensors = (self.input_ids, self.position_ids, self.labels, self.loss_mask, self.samples)
        return [
            StepBatch(*pieces) for pieces in zip(*(tensor.chunk(count) for tensor in tensors), strict=True)
        ]


@dataclass(frozen=True)
class PipelineShapes:
    """The static shapes of a runner: M micro batches of [b, S], hidden states [b, S, H] between chunks, losses [b]."""

    micro_batches: int
    micro_batch_size: int
    sequence_length: int
    hidden_size: int
    dtype: torch.dtype
    loss_dtype: torch.dtype


class PipelineRunner(Protocol):
    """Forward and backward of one global batch; leaves gradients to be averaged over dp in `.grad`."""

    def forward_backward(self, batch: StepBatch) -> float:
        """The loss of the step: the mean over every counted token of the global batch, on every rank."""
        ...


def pipeline_runner(
    chunks: Sequence[nn.Module],
    mesh: ParallelMesh,
    shapes: PipelineShapes,
    *,
    schedule: str,
    forward: Callable[..., Tensor] | None = None,
) -> PipelineRunner:
    """The runner for this mesh.

    chunks: the pieces of the model that this rank holds, ascending; each has its place in model order as `index`.
    forward: stands for the only chunk's call at pp = 1 (an engine's forward).
    """
    if mesh.pp.size == 1:
        (only,) = chunks
        return _LoopRunner(forward or only, mesh, shapes)
    return _ScheduleRunner(chunks, mesh, shapes, schedule)


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
    """The chunks of one stage of several, driven by a schedule of torch.distributed.pipelining."""

    def __init__(
        self, chunks: Sequence[nn.Module], mesh: ParallelMesh, shapes: PipelineShapes, schedule: str
    ):
        self._mesh = mesh
        self._scale = 0.0
        stages = [_pipeline_stage(chunk, len(chunks) * mesh.pp.size, mesh, shapes) for chunk in chunks]
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)
        arguments: dict[str, Any] = {
            "n_microbatches": shapes.micro_batches,
            "loss_fn": lambda losses, _labels: losses.sum() * self._scale,
            # The loss is scaled once, by the global count of tokens; torch must not divide again.
            "scale_grads": False,
        }
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if schedule in _SINGLE:
            (only,) = stages
            self._schedule = _SINGLE[schedule](only, **arguments)
        else:
            self._schedule = _MULTI[schedule](list(stages), **arguments)

    def forward_backward(self, batch: StepBatch) -> float:
        self._scale = _loss_scale(batch, self._mesh)
        inputs = (batch.input_ids,) if self._has_first else ()
        target = batch.labels if self._has_last else None
        losses: list[Tensor] = []
        self._schedule.step(
            *inputs, target=target, losses=losses, return_outputs=False, **_stage_arguments(batch)
        )
        return _mean_over_replicas(sum(loss.item() for loss in losses), self._mesh)


def _pipeline_stage(
    chunk: nn.Module, chunks: int, mesh: ParallelMesh, shapes: PipelineShapes
) -> PipelineStage:
    index: int = chunk.index  # type: ignore[assignment]
    # With both shapes given, torch runs no extra forward and backward to find them out.
    tokens = (shapes.micro_batch_size, shapes.sequence_length)
    hidden = torch.empty(*tokens, shapes.hidden_size, dtype=shapes.dtype, device="meta", requires_grad=True)
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    losses = torch.empty(shapes.micro_batch_size, dtype=shapes.loss_dtype, device="meta", requires_grad=True)
    return PipelineStage(
        chunk,
        index,
        chunks,
        mesh.device,
        input_args=ids if index == 0 else hidden,
        output_args=losses if index == chunks - 1 else hidden,
        group=mesh.pp.group,
    )


def _stage_arguments(batch: StepBatch) -> dict[str, Any]:
    return {
        "position_ids": batch.position_ids,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "samples": batch.samples,
    }


def _loss_scale(batch: StepBatch, mesh: ParallelMesh) -> float:
    """dp size over the weight of all tokens of the global batch: with gradients averaged over dp, any split of
    the batch gives the gradient of the same mean."""
    weight = batch.loss_mask.double().masked_fill(batch.labels == IGNORE_INDEX, 0).sum()
    total = all_reduce(weight, mesh.dp, dist.ReduceOp.SUM).item()
    return mesh.dp.size / total if total > 0 else 0.0


def _mean_over_replicas(loss: float, mesh: ParallelMesh) -> float:
    """From each rank's scaled loss (zero where the last chunk is not) to the one loss of the step."""
    counted = loss if mesh.tp.rank == 0 else 0.0
    return mesh.sum_over_world([counted])[0] / mesh.dp.size
