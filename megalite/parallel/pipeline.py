"""Runners of one step's micro batches: through the stages by a schedule, or a plain loop at pp = 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.parallel.collectives import all_reduce
from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.decode import along_chunks
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.schedule import StageSchedule
from megalite.parallel.step_batch import StepBatch
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import scheduled_actions


@dataclass(frozen=True)
class PipelineShapes:
    """The shapes of a runner: M micro batches, hidden states [b, S, H] between chunks.

    With sequence parallelism hidden states are [b, S / tp, H]. b and S follow from each batch.
    """

    micro_batches: int
    hidden_size: int
    dtype: torch.dtype


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

    chunks: this rank's chunks of the model, ascending.
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
    """Runs the chunks of one of several stages by a schedule."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        split: PipelineSplit,
        mesh: ParallelMesh,
        shapes: PipelineShapes,
        schedule: str,
    ):
        self._chunks, self._split, self._mesh, self._shapes = chunks, split, mesh, shapes
        self._by_index = dict(zip(split.chunks_of(mesh.at.pp), chunks, strict=True))
        orders = orders_of(schedule, split.stages, shapes.micro_batches, split.chunks_per_stage)
        self._stage = StageSchedule(scheduled_actions(orders, split, mesh.at.pp), mesh)

    def forward_backward(self, batch: StepBatch, loss_scale: float = 1.0) -> Tensor:
        weighted = _weighted(batch, _token_weight(batch, self._mesh) * loss_scale)
        micro_batches = weighted.micro_batches(self._shapes.micro_batches)

        def run(chunk: int, micro_batch: int, hidden_states: Tensor | None) -> Tensor:
            output = self._run_chunk(self._by_index[chunk], micro_batches[micro_batch], hidden_states)
            return output.sum() if chunk == len(self._split.layers) - 1 else output

        losses = self._stage.run(run, self._hidden(micro_batches[0]))
        return _mean_over_replicas(_total(losses, self._mesh) / loss_scale, self._mesh)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        micro_batches = batch.micro_batches(self._shapes.micro_batches)
        losses = [self._losses_of(each) for each in micro_batches]
        sums = [each.sum() for each in losses if each is not None]
        return _sums_over_replicas(_total(sums, self._mesh), batch, self._mesh)

    def _losses_of(self, micro_batch: StepBatch) -> Tensor | None:
        """Return the output of the last chunk on the stage that holds it."""

        def run(chunk: nn.Module, hidden_states: Tensor | None) -> Tensor:
            return self._run_chunk(chunk, micro_batch, hidden_states)

        return along_chunks(self._chunks, self._split, self._mesh, run, self._hidden(micro_batch))

    @staticmethod
    def _run_chunk(chunk: nn.Module, micro_batch: StepBatch, hidden_states: Tensor | None) -> Tensor:
        inputs = micro_batch.input_ids if hidden_states is None else hidden_states
        output: Tensor = chunk(inputs, **_stage_arguments(micro_batch))
        return output

    def _hidden(self, micro_batch: StepBatch) -> Tensor:
        """Return an empty tensor like the hidden states between chunks, which costs no memory."""
        rows, length = micro_batch.input_ids.shape
        between = (rows, len(self._mesh.sequence_range(length)), self._shapes.hidden_size)
        return torch.empty((), dtype=self._shapes.dtype, device=self._mesh.device).expand(between)


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
