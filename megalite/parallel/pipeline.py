"""Runners of one step's micro batches through the stages: torch.distributed.pipelining, or a plain loop at pp = 1."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from megalite.parallel.decode import along_chunks
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.stages import PipelineSplit

# Schedules with one chunk per rank, then with several.
_SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


_SCHEDULE_LOG = logging.getLogger("torch.distributed.pipelining.schedules")


def _without_schedule(record: logging.LogRecord) -> bool:
    """Leave out the whole schedule that torch logs on each rank before it raises the error of one action.

    The error itself is reported with its rank. With that logger at INFO or below the schedule is printed.
    """
    return record.levelno < logging.ERROR or _SCHEDULE_LOG.isEnabledFor(logging.INFO)


_SCHEDULE_LOG.addFilter(_without_schedule)


@dataclass(frozen=True)
class PipelineShapes:
    """The fixed shapes of a runner: M micro batches, hidden states [b, S, H] between chunks, losses [b].

    With sequence parallelism hidden states are [b, S / tp, H]. b and S follow from the batch; every new pair (b, S)
    costs a schedule and its buffers, so batches should have few distinct lengths.
    """

    micro_batches: int
    hidden_size: int
    dtype: torch.dtype
    loss_dtype: torch.dtype


class PipelineRunner(Protocol):
    """Forward and backward of one global batch; leaves gradients in `.grad`, not yet averaged over dp.

    Batches and returned tensors are on the mesh's device; no method makes the host wait for the device.
    """

    def forward_backward(self, batch: StepBatch, loss_scale: float = 1.0) -> Tensor:
        """Return the step's loss, a float64 scalar equal on every rank: the weighted mean over the global batch.

        loss_scale: factor of the gradients; the returned loss is unscaled.
        """
        ...

    def evaluate(self, batch: StepBatch) -> Tensor:
        """Run forward only; return [2] float64 over the global batch: the sums of weighted token losses and weights."""
        ...


def pipeline_runner(
    chunks: Sequence[nn.Module],
    split: PipelineSplit,
    mesh: ParallelMesh,
    shapes: PipelineShapes,
    *,
    schedule: str,
    forward: Callable[..., Tensor] | None = None,
) -> PipelineRunner:
    """Return the runner for this mesh.

    chunks: this rank's chunks of the model, ascending; each has `index` (its place in model order), `is_first` and
    `is_last`.
    forward: called instead of the only chunk at pp = 1 (a DeepSpeed engine's forward).
    """
    if mesh.pp.size == 1:
        (only,) = chunks
        return _LoopRunner(forward or only, mesh, shapes)
    return _ScheduleRunner(chunks, split, mesh, shapes, schedule)


class _LoopRunner:
    """Gradient accumulation: the one-stage schedule."""

    def __init__(self, forward: Callable[..., Tensor], mesh: ParallelMesh, shapes: PipelineShapes):
        self._forward, self._mesh, self._shapes = forward, mesh, shapes

    def forward_backward(self, batch: StepBatch, loss_scale: float = 1.0) -> Tensor:
        weighted = _weighted(batch, _token_weight(batch, self._mesh) * loss_scale)
        losses: list[Tensor] = []
        for micro_batch in weighted.micro_batches(self._shapes.micro_batches):
            loss = self._forward(micro_batch.input_ids, **_stage_arguments(micro_batch)).sum()
            loss.backward()
            losses.append(loss.detach())
        return _mean_over_replicas(_total(losses, self._mesh) / loss_scale, self._mesh)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        losses = [
            self._forward(micro_batch.input_ids, **_stage_arguments(micro_batch)).sum()
            for micro_batch in batch.micro_batches(self._shapes.micro_batches)
        ]
        return _sums_over_replicas(_total(losses, self._mesh), batch, self._mesh)


class _ScheduleRunner:
    """Runs the chunks of one of several stages by a schedule of torch.distributed.pipelining."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        split: PipelineSplit,
        mesh: ParallelMesh,
        shapes: PipelineShapes,
        schedule: str,
    ):
        self._chunks, self._split, self._mesh = chunks, split, mesh
        self._shapes, self._schedule = shapes, schedule
        self._executors: dict[torch.Size, PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def forward_backward(self, batch: StepBatch, loss_scale: float = 1.0) -> Tensor:
        weighted = _weighted(batch, _token_weight(batch, self._mesh) * loss_scale)
        # A schedule's buffers have a fixed shape: each batch shape gets its own schedule on first use.
        size = batch.input_ids.shape
        if size not in self._executors:
            self._executors[size] = self._executor(size)
        first, last = (any(getattr(chunk, end) for chunk in self._chunks) for end in ("is_first", "is_last"))
        losses: list[Tensor] = []
        self._executors[size].step(
            *((batch.input_ids,) if first else ()),
            target=batch.labels if last else None,
            losses=losses,
            return_outputs=False,
            **_stage_arguments(weighted),
        )
        return _mean_over_replicas(_total(losses, self._mesh) / loss_scale, self._mesh)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        # Not the schedule's own `eval`: torch's is wrong for V-shaped schedules.
        micro_batches = batch.micro_batches(self._shapes.micro_batches)
        losses = [self._losses_of(each) for each in micro_batches]
        sums = [each.sum() for each in losses if each is not None]
        return _sums_over_replicas(_total(sums, self._mesh), batch, self._mesh)

    def _losses_of(self, micro_batch: StepBatch) -> Tensor | None:
        """Return the output of the last chunk on the stage that holds it."""

        def run(chunk: nn.Module, hidden_states: Tensor | None) -> Tensor:
            inputs = micro_batch.input_ids if hidden_states is None else hidden_states
            output: Tensor = chunk(inputs, **_stage_arguments(micro_batch))
            return output

        rows, length = micro_batch.input_ids.shape
        between = (rows, len(self._mesh.sequence_range(length)), self._shapes.hidden_size)
        hidden = torch.empty(between, dtype=self._shapes.dtype, device=self._mesh.device)
        return along_chunks(self._chunks, self._split, self._mesh, run, hidden)

    def _executor(self, size: torch.Size) -> PipelineScheduleSingle | PipelineScheduleMulti:
        rows, length = size
        tokens = (rows // self._shapes.micro_batches, length)
        stages = [self._stage(chunk, tokens) for chunk in self._chunks]
        arguments: dict[str, Any] = {
            "n_microbatches": self._shapes.micro_batches,
            "loss_fn": lambda losses, _labels: losses.sum(),
            # `_token_weight` already divides by the global token weight; torch must not divide again.
            "scale_grads": False,
        }
        if self._schedule in _SINGLE:
            (only,) = stages
            return _SINGLE[self._schedule](only, **arguments)
        return _MULTI[self._schedule](list(stages), **arguments)

    def _stage(self, chunk: nn.Module, tokens: tuple[int, int]) -> PipelineStage:
        # With both shapes given, torch needs no extra forward and backward to infer them.
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        held = len(self._mesh.sequence_range(tokens[1]))
        hidden = self._placeholder((tokens[0], held, self._shapes.hidden_size), self._shapes.dtype)
        losses = self._placeholder(tokens[:1], self._shapes.loss_dtype)
        return PipelineStage(
            chunk,
            chunk.index,  # type: ignore[arg-type]
            len(self._split.layers),
            self._mesh.device,
            input_args=ids if chunk.is_first else hidden,
            output_args=losses if chunk.is_last else hidden,
            group=self._mesh.pp.group,
        )

    @staticmethod
    def _placeholder(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)


def _stage_arguments(batch: StepBatch) -> dict[str, Any]:
    arguments = {
        "position_ids": batch.position_ids,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "sample_indices": batch.sample_indices,
        "document_ids": batch.document_ids,
        "cu_seqlens": batch.cu_seqlens,
    }
    return {name: tensor for name, tensor in arguments.items() if tensor is not None}


def _token_weight(batch: StepBatch, mesh: ParallelMesh) -> Tensor:
    """Return the factor of each token loss: copies of the weights / summed token weights of the global batch.

    Gradients are averaged over the copies, so any split of the batch gives the gradient of the same mean.
    """
    total = all_reduce(_weight(batch), mesh.loss, dist.ReduceOp.SUM)
    return torch.where(total > 0, mesh.dense_gradients.size / total, 0.0)


def _weighted(batch: StepBatch, scale: Tensor) -> StepBatch:
    """Return the batch with its loss mask times `scale`; scaling the loss would cost a pass over the logits."""
    return replace(batch, loss_mask=batch.loss_mask.double() * scale)


def _weight(batch: StepBatch) -> Tensor:
    return batch.loss_mask.double().masked_fill(batch.labels == IGNORE_INDEX, 0).sum()


def _total(losses: Sequence[Tensor], mesh: ParallelMesh) -> Tensor:
    """Return the float64 sum of scalars, added in order; zero if there are none."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss.detach()
    return total


def _sums_over_replicas(loss: Tensor, batch: StepBatch, mesh: ParallelMesh) -> Tensor:
    """Sum each rank's loss (zero without the last chunk) and its batch's weight over the replicas: [2]."""
    counted = mesh.counts_replicated
    alone = counted and mesh.pp.rank == 0
    nothing = torch.zeros_like(loss)
    sums = torch.stack((loss if counted else nothing, _weight(batch) if alone else nothing))
    return mesh.reduce_over_world(sums)


def _mean_over_replicas(loss: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return the step's loss from each rank's scaled loss (zero without the last chunk)."""
    counted = loss if mesh.counts_replicated else torch.zeros_like(loss)
    return mesh.reduce_over_world(counted) / mesh.dense_gradients.size
