"""Runners of one step's micro batches: through the stages by a schedule, or a plain loop at pp = 1."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.parallel.decode import along_chunks
from megalite.parallel.gradient_buckets import GradientBuckets
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

    def forward_backward(self, batch: StepBatch, weight: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Return this rank's share of the step's loss, a float64 scalar; the shares of all ranks sum to the weighted
        mean over the global batch.

        weight: the sum of `weight_share` over all ranks. loss_scale: factor of the gradients; the loss is unscaled.
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
    buckets: GradientBuckets | None = None,
) -> PipelineRunner:
    """Return the runner for this mesh.

    chunks: this rank's chunks of the model, ascending.
    forward: called instead of the only chunk at pp = 1 (a DeepSpeed engine's forward).
    buckets: the sums over the data-parallel ranks, which start as soon as gradients are complete.
    """
    if mesh.pp.size == 1:
        (only,) = chunks
        return _LoopRunner(forward or only, mesh, shapes, buckets)
    return _ScheduleRunner(chunks, split, mesh, shapes, schedule, buckets)


class _LoopRunner:
    """Gradient accumulation: the one-stage schedule."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        mesh: ParallelMesh,
        shapes: PipelineShapes,
        buckets: GradientBuckets | None,
    ):
        self._forward, self._mesh, self._shapes, self._buckets = forward, mesh, shapes, buckets

    def forward_backward(self, batch: StepBatch, weight: Tensor, loss_scale: float = 1.0) -> Tensor:
        weighted = _weighted(batch, _token_factor(weight, self._mesh) * loss_scale)
        losses: list[Tensor] = []
        micro_batches = weighted.micro_batches(self._shapes.micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            with _watched(self._buckets, index + 1 == len(micro_batches)):
                loss = self._forward(micro_batch.input_ids, **_stage_arguments(micro_batch)).sum()
            loss.backward()
            losses.append(loss.detach())
        return _loss_share(losses, self._mesh) / loss_scale

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        losses = [
            self._forward(micro_batch.input_ids, **_stage_arguments(micro_batch)).sum()
            for micro_batch in batch.micro_batches(self._shapes.micro_batches)
        ]
        return _sums_over_replicas(losses, batch, self._mesh)


class _ScheduleRunner:
    """Runs the chunks of one of several stages by a schedule."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        split: PipelineSplit,
        mesh: ParallelMesh,
        shapes: PipelineShapes,
        schedule: str,
        buckets: GradientBuckets | None,
    ):
        self._chunks, self._split, self._mesh, self._shapes = chunks, split, mesh, shapes
        self._buckets = buckets
        self._by_index = dict(zip(split.chunks_of(mesh.at.pp), chunks, strict=True))
        orders = orders_of(schedule, split.stages, shapes.micro_batches, split.chunks_per_stage)
        self._stage = StageSchedule(scheduled_actions(orders, split, mesh.at.pp), mesh)

    def forward_backward(self, batch: StepBatch, weight: Tensor, loss_scale: float = 1.0) -> Tensor:
        weighted = _weighted(batch, _token_factor(weight, self._mesh) * loss_scale)
        micro_batches = weighted.micro_batches(self._shapes.micro_batches)

        def run(chunk: int, micro_batch: int, hidden_states: Tensor | None) -> Tensor:
            with _watched(self._buckets, self._stage.completes_in_backward(chunk, micro_batch)):
                output = self._run_chunk(self._by_index[chunk], micro_batches[micro_batch], hidden_states)
            return output.sum() if chunk == len(self._split.layers) - 1 else output

        complete = _nothing if self._buckets is None else self._buckets.chunk_complete
        losses = self._stage.run(run, self._hidden(micro_batches[0]), complete)
        return _loss_share(losses, self._mesh) / loss_scale

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        micro_batches = batch.micro_batches(self._shapes.micro_batches)
        losses = [self._losses_of(each) for each in micro_batches]
        sums = [each.sum() for each in losses if each is not None]
        return _sums_over_replicas(sums, batch, self._mesh)

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


def _watched(buckets: GradientBuckets | None, completes: bool) -> AbstractContextManager[None]:
    return buckets.last_forward() if buckets is not None and completes else nullcontext()


def _nothing(chunk: int) -> None:
    pass


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


def weight_share(batch: StepBatch, mesh: ParallelMesh) -> Tensor:
    """Return this rank's share of the summed token weights of the global batch, [] float64.

    One rank of each data-parallel replica counts its batch; the share of the others is zero.
    """
    if mesh.counts_replicated and mesh.pp.rank == 0:
        return batch.loss_mask.double().masked_fill(batch.labels == IGNORE_INDEX, 0).sum()
    return torch.zeros((), dtype=torch.float64, device=mesh.device)


def _token_factor(weight: Tensor, mesh: ParallelMesh) -> Tensor:
    """Return the factor of each token loss: copies of the weights / summed token weights of the global batch.

    Gradients are averaged over the copies, so any split of the batch gives the gradient of the same mean.
    """
    return torch.where(weight > 0, mesh.dense_gradients.size / weight, 0.0)


def _weighted(batch: StepBatch, scale: Tensor) -> StepBatch:
    """Return the batch with its loss mask times `scale`; scaling the loss would cost a pass over the logits."""
    return replace(batch, loss_mask=batch.loss_mask.double() * scale)


def _total(losses: Sequence[Tensor], mesh: ParallelMesh) -> Tensor:
    """Return the float64 sum of scalars, added in order; zero if there are none."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss.detach()
    return total


def _sums_over_replicas(losses: Sequence[Tensor], batch: StepBatch, mesh: ParallelMesh) -> Tensor:
    """Sum each rank's losses (none without the last chunk) and its batch's weight over the replicas: [2]."""
    return mesh.reduce_over_world(torch.stack((_counted(losses, mesh), weight_share(batch, mesh))))


def _loss_share(losses: Sequence[Tensor], mesh: ParallelMesh) -> Tensor:
    """Return a rank's share of the step's loss from its micro batches' scaled losses (none without the last chunk)."""
    return _counted(losses, mesh) / mesh.dense_gradients.size


def _counted(losses: Sequence[Tensor], mesh: ParallelMesh) -> Tensor:
    """Return the total on the one tensor-parallel rank whose copy counts, zero on the others."""
    return _total(losses if mesh.counts_replicated else (), mesh)
