"""Runs one step's micro batches through the stages by a schedule; that of one stage accumulates gradients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce, reduce_from
from megalite.parallel.context import cut
from megalite.parallel.decode import along_chunks
from megalite.parallel.gradient_buckets import GradientBuckets
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.objective import NEXT_TOKEN, Objective
from megalite.parallel.schedule import StageSchedule
from megalite.parallel.step_batch import EVALUATION, TRAINING, ForwardMode, StepBatch
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import stage_programs


@dataclass(frozen=True)
class PipelineShapes:
    """The shapes of a runner: M micro batches, hidden states [b, S, H] between chunks, run by a schedule.

    With sequence parallelism hidden states are [b, S / tp, H], and S is a rank's part where context parallelism cuts
    the rows. b and S follow from each batch. schedule: a name of
    topology.schedules; a single stage runs 1F1B whatever it is.
    """

    micro_batches: int
    hidden_size: int
    dtype: torch.dtype
    schedule: str = "1f1b"


class PipelineRunner:
    """Forward and backward of one global batch; leaves gradients in `.grad`, not yet summed over dp and cp.

    Batches have whole rows, which this cuts over the context-parallel ranks. They and returned tensors are on the
    mesh's device; no method makes the host wait for the device.
    """

    def __init__(
        self,
        chunks: Sequence[Callable[..., Tensor]],
        split: PipelineSplit,
        mesh: ParallelMesh,
        shapes: PipelineShapes,
        *,
        buckets: GradientBuckets | None = None,
        objective: Objective = NEXT_TOKEN,
    ):
        """
        chunks: this rank's chunks of the model, ascending; at pp = 1 the only one may be a DeepSpeed engine's forward.
        buckets: the sums over the data-parallel ranks, which start as soon as gradients are complete.
        objective: the loss of a micro batch, from the loss sums of its rows.
        """
        self._chunks, self._split, self._mesh, self._shapes = chunks, split, mesh, shapes
        self._buckets, self._objective = buckets, objective
        self._by_index = dict(zip(split.chunks_of(mesh.at.pp), chunks, strict=True))
        # With one stage every other schedule would only keep more activations.
        name = shapes.schedule if split.stages > 1 else "1f1b"
        orders = orders_of(name, split.stages, shapes.micro_batches, split.chunks_per_stage)
        self._stage = StageSchedule(stage_programs(orders, split)[mesh.at.pp], mesh)

    def forward_backward(self, batch: StepBatch, weight: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Return this rank's shares of the step's loss and of the objective's figures, [1 + figures] float64; those of
        all ranks sum to the weighted means over the global batch.

        weight: the sum of `weight_share` over all ranks. loss_scale: factor of the gradients; the loss is unscaled.
        """
        weighted = self._objective.weighted(batch, _mean_factor(weight) * loss_scale)
        whole = weighted.micro_batches(self._shapes.micro_batches)
        micro_batches = [cut(each, self._mesh) for each in whole]
        sums = _LossSums(self._objective, self._mesh)
        # The mean over the sequences of the global batch; gradients are summed over its ranks.
        sequences = len(batch.input_ids) * self._mesh.batch.size
        mode = replace(TRAINING, router_scale=loss_scale / sequences)

        def run(chunk: int, index: int, hidden_states: Tensor | None) -> Tensor:
            with _watched(self._buckets, self._stage.completes_in_backward(chunk, index)):
                output = _run_chunk(self._by_index[chunk], micro_batches[index], hidden_states, mode)
            return sums.loss(output, whole[index]) if chunk == len(self._split.layers) - 1 else output

        complete = _nothing if self._buckets is None else self._buckets.chunk_complete
        self._stage.run(run, self._hidden(micro_batches[0]), complete)
        return sums.shares(weight, loss_scale)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Tensor:
        """Run forward only, without dropout, with the plain cross entropy or the loss of preferences; return
        [2 + figures] float64 over the global batch: the sums of weighted losses, of weights and of figures."""
        sums = _LossSums(self._objective, self._mesh)
        for micro_batch in batch.micro_batches(self._shapes.micro_batches):
            losses = self._losses_of(micro_batch, EVALUATION)
            if losses is not None:
                sums.loss(losses, micro_batch)
        return sums.over_replicas(batch)

    @torch.no_grad()
    def row_losses(self, batch: StepBatch, mode: ForwardMode = EVALUATION) -> Tensor | None:
        """Run forward only; return the loss sum of each row of this rank's batch, [M * b] float64.

        None on stages without the last chunk; equal on the tensor- and context-parallel ranks of one batch.
        """
        losses = [self._losses_of(each, mode) for each in batch.micro_batches(self._shapes.micro_batches)]
        here = [each for each in losses if each is not None]
        return all_reduce(torch.cat(here).double(), self._mesh.cp) if here else None

    def _losses_of(self, whole: StepBatch, mode: ForwardMode) -> Tensor | None:
        """Return the output of the last chunk on the stage that holds it, from a micro batch of whole rows."""
        micro_batch = cut(whole, self._mesh)

        def run(chunk: Callable[..., Tensor], hidden_states: Tensor | None) -> Tensor:
            return _run_chunk(chunk, micro_batch, hidden_states, mode)

        return along_chunks(self._chunks, self._split, self._mesh, run, self._hidden(micro_batch))

    def _hidden(self, micro_batch: StepBatch) -> Tensor:
        """Return an empty tensor like the hidden states between chunks, which costs no memory."""
        rows, length = micro_batch.input_ids.shape
        between = (rows, len(self._mesh.sequence_range(length)), self._shapes.hidden_size)
        return torch.empty((), dtype=self._shapes.dtype, device=self._mesh.device).expand(between)


def _run_chunk(
    chunk: Callable[..., Tensor],
    micro_batch: StepBatch,
    hidden_states: Tensor | None,
    mode: ForwardMode,
) -> Tensor:
    inputs = micro_batch.input_ids if hidden_states is None else hidden_states
    return chunk(inputs, batch=micro_batch, mode=mode)


def _watched(buckets: GradientBuckets | None, completes: bool) -> AbstractContextManager[None]:
    return buckets.last_forward() if buckets is not None and completes else nullcontext()


def _nothing(chunk: int) -> None:
    pass


def weight_share(batch: StepBatch, mesh: ParallelMesh, objective: Objective = NEXT_TOKEN) -> Tensor:
    """Return this rank's share of the summed weights of the global batch, [] float64: of tokens, or of pairs.

    batch: of whole rows. One of the ranks with the same rows counts them; the share of the others is zero.
    """
    if mesh.counts_samples and mesh.pp.rank == 0:
        return objective.weight(batch)
    return torch.zeros((), dtype=torch.float64, device=mesh.device)


def _mean_factor(weight: Tensor) -> Tensor:
    """Return the factor of each loss in the mean: 1 / summed weights of the global batch.

    Gradients are summed over the data-parallel ranks, so any split of the batch gives the gradient of the same mean,
    and no rank's gradients are larger than those of one process: fp16 has no more range for them.
    """
    return torch.where(weight > 0, 1 / weight, 0.0)


class _LossSums:
    """The losses and figures of the micro batches whose last chunk is on this rank."""

    def __init__(self, objective: Objective, mesh: ParallelMesh):
        self._objective, self._mesh = objective, mesh
        self._losses: list[Tensor] = []
        self._figures: list[Tensor] = []

    def loss(self, row_losses: Tensor, micro_batch: StepBatch) -> Tensor:
        """Note and return the loss of a micro batch of whole rows from the last chunk's output [b]."""
        if self._objective.of_rows:
            # A copy, since the sum overwrites its input.
            row_losses = reduce_from(row_losses.clone(), self._mesh.cp)
        loss = self._objective.loss(row_losses, micro_batch)
        self._losses.append(loss.detach())
        if self._objective.figures:
            self._figures.append(self._objective.figure_sums(row_losses, micro_batch))
        return loss

    def shares(self, weight: Tensor, loss_scale: float) -> Tensor:
        """Return this rank's shares of the step's means, [1 + figures], from scaled losses. weight: of all ranks."""
        loss = self._counted(self._losses) / loss_scale
        return torch.stack((loss, *(torch.where(weight > 0, each / weight, 0.0) for each in self._sums())))

    def over_replicas(self, batch: StepBatch) -> Tensor:
        """Sum each rank's losses, its batch's weight and its figures over the replicas: [2 + figures]."""
        weight = weight_share(batch, self._mesh, self._objective)
        own = (self._counted(self._losses), weight, *self._sums())
        return self._mesh.reduce_over_world(torch.stack(own))

    def _sums(self) -> list[Tensor]:
        """Return this rank's sum of each figure."""
        return [
            self._counted([each[figure] for each in self._figures])
            for figure in range(len(self._objective.figures))
        ]

    def _counted(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the total on the ranks whose losses count, zero on the others."""
        counts = self._mesh.counts_samples if self._objective.of_rows else self._mesh.counts_loss
        return _total(losses if counts else (), self._mesh)


def _total(losses: Sequence[Tensor], mesh: ParallelMesh) -> Tensor:
    """Return the float64 sum of scalars, added in order; zero if there are none."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss.detach()
    return total
