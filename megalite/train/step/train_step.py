"""TrainStep: a rank's model, optimizer, pipeline and batches; one step, a checkpoint's draft, and resuming."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.failures import explain
from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.manifest import Base
from megalite.checkpoint.save import RunRecord, draft_checkpoint
from megalite.checkpoint.unpublished import Draft
from megalite.checkpoint.weights import fill
from megalite.config.deepspeed.scheduler_rates import DeepSpeedSchedule
from megalite.config.sections.schema import RunConfig
from megalite.convert.huggingface.new_rows import NewRows
from megalite.convert.peft.base import base_of, require_base
from megalite.convert.weight_source import WeightSource
from megalite.convert.weights import open_weights
from megalite.data.batches.context_blocks import windows_of, with_blocks
from megalite.data.batches.loader import StepLoader
from megalite.data.batches.prefetch import Prefetch
from megalite.data.batches.stream_loader import TrainingLoader
from megalite.data.batches.transfer import ArrivingBatch, BatchTransfer
from megalite.errors import CheckpointError, TrainingError
from megalite.launcher.control.progress import Activity, progress
from megalite.model.replica import Replica
from megalite.model.stages import initialise
from megalite.model.transformer import Stage
from megalite.monitor.losses import LossSpikes
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.parallel.pipeline import weight_share
from megalite.parallel.step_batch import WITHOUT_ADAPTER, StepBatch
from megalite.selftest.decide import KernelChoice, known_kernels
from megalite.topology.shape import ModelShape
from megalite.train.assemble import StepSchedule, TrainingPlan, assemble
from megalite.train.optimizer.protocol import Update
from megalite.train.step.nonfinite_output import nonfinite_cause
from megalite.train.step.options import model_options, objective_of, optimizer_settings, schedule_of
from megalite.train.step.precision import DTYPES
from megalite.train.step.reference import is_without_adapter
from megalite.train.step.router_load import RouterLoad
from megalite.train.step.state import StepReport, TrainerState
from megalite.train.step.step_records import ended_epoch, norms_of
from megalite.train.step.step_totals import StepTotals, total_over_ranks
from megalite.train.step.stream_position import gathered_position, go_on
from megalite.train.step.update_policy import REMEDY, describe_skip, limit_reached, skip_spike


@dataclass(frozen=True)
class _NextBatch:
    """The batch after `samples`, or the error of reading it; weight: the token weight of the global batch."""

    samples: int
    batch: Future[StepBatch]
    weight: Tensor


@dataclass(frozen=True)
class StartingPoint:
    """Where the weights come from; by default they are drawn.

    weights: a Hugging Face folder to start from instead of random values; beside an adapter always given.
    new_rows: rows of the vocabulary for tokens that the weights do not know.
    resumed: `TrainStep.resume` follows, which fills all weights that are trained: nothing is drawn.
    prepare: called with the replica and its weights, before the optimizer copies them and registers its hooks.
    """

    weights: Path | None = None
    new_rows: NewRows | None = None
    resumed: bool = False
    prepare: Callable[[Replica], None] = lambda replica: None


class TrainStep:
    """Trains the model of `config` on this rank, a step a call; every rank of the mesh makes one and calls it alike."""

    def __init__(
        self,
        config: RunConfig,
        mesh: ParallelMesh,
        shape: ModelShape,
        loader: TrainingLoader,
        *,
        start: StartingPoint = StartingPoint(),
        kernels: KernelChoice | None = None,
    ):
        """kernels: which operators the model uses; None chooses them by what this machine has tested before."""
        self.config, self.loader, self.weights = config, loader, start.weights
        self.state = TrainerState()
        self.fingerprints: dict[str, str] = {}
        """Name -> fingerprint of what the samples are made of, for checkpoints."""
        self.kernels = kernels or known_kernels(config, shape, DTYPES[config.training.precision], mesh.device)
        options, self.objective = model_options(config, self.kernels.operators), objective_of(config)
        self._loss_dtype = options.loss_dtype
        progress.begin(Activity.BUILDING)
        plan = TrainingPlan(
            shape,
            config.split,
            options,
            optimizer_settings(config),
            StepSchedule(config.parallel.schedule, config.batch.micro_batches),
            self.objective,
            config.deepspeed_json() if config.zero_stage else None,
        )
        self.replica, self.optimizer, self.pipeline = assemble(
            plan,
            mesh,
            seed=None if start.weights is not None or start.resumed else config.run.seed,
            prepare=partial(_start_from, start, config),
        )
        if not start.resumed:
            self.replica.require_weights()
        self.routers = RouterLoad(self.replica, config.training.router_bias_rate)
        self.spikes = LossSpikes(config.training.spike_window, config.training.spike_deviations)
        self.base = None if shape.adapter is None or start.weights is None else _base(config, mesh)
        preferences = config.data.kind == "preference"
        self._reference_is_without_adapter = (
            preferences and is_without_adapter(shape) and config.adapter.path is None
        )
        self.needs_reference_losses = preferences and not self._reference_is_without_adapter
        """Whether every loader must have the reference's losses of its samples (train.step.reference)."""
        self.transfer, self._windows = BatchTransfer(mesh.device), windows_of(shape)
        self.batches = self._training_batches()
        self._next: _NextBatch | None = None
        self._waited_seconds = 0.0
        self.learning_rate = schedule_of(config, self.total_steps)

    @property
    def mesh(self) -> ParallelMesh:
        return self.replica.mesh

    @property
    def shape(self) -> ModelShape:
        return self.replica.shape

    @property
    def stage(self) -> Stage:
        return self.replica.stage

    @property
    def total_steps(self) -> int:
        """The last step of the run. With `epochs`: the steps done, and the remaining samples divided by the current
        global batch size."""
        training = self.config.training
        if training.steps:
            return training.steps
        after = self.state.samples
        return self.state.step + self.loader.steps_for_epochs(training.epochs or 1.0, after=after)

    @property
    def tokens_per_step(self) -> int:
        """The positions of a global batch; with data.length_buckets, the most that one has."""
        return self.config.batch.global_batch_size * self.config.training.sequence_length

    def prefetch(self, loader: TrainingLoader, *, end: int) -> Prefetch[ArrivingBatch]:
        """Return the batches of `loader` up to `end` samples, which threads read ahead and copy to the device."""
        return Prefetch(
            partial(self._arriving_batch, loader),
            stride=self.config.batch.global_batch_size,
            end=end,
            workers=self.config.data.loader_workers,
            depth=self.config.data.prefetch,
        )

    def _training_batches(self) -> Prefetch[ArrivingBatch]:
        """The batches of the remaining steps, each of today's global batch size."""
        left = (self.total_steps - self.state.step) * self.config.batch.global_batch_size
        return self.prefetch(self.loader, end=self.state.samples + left)

    def _arriving_batch(self, loader: TrainingLoader, consumed_samples: int) -> ArrivingBatch:
        """Read the batch of `loader` after `consumed_samples` and start its copy to the device; thread-safe."""
        batch: StepBatch = loader.step_batch(consumed_samples, dtype=self._loss_dtype)
        if self.mesh.context_method == "gather":
            # Ulysses works on whole rows, equally on every rank, and the ring on the blocks of zig-zag.
            batch = with_blocks(batch, self.mesh.cp.size, self._windows)
        return self.transfer.start(batch)

    def train_step(
        self, flags: Callable[[], Sequence[bool]] = tuple, before_update: Callable[[], object] = tuple
    ) -> StepReport:
        """One global batch: forward and backward of all micro batches, then one update.

        flags: called before the update; the report tells which of the flags any rank raised, with no collective of
        their own. Every rank gives as many. before_update: called before weights and optimizer state change.
        """
        started, self._waited_seconds = time.perf_counter(), 0.0
        batch, weight = self._this_batch()
        loss_scale = self.optimizer.loss_scale
        progress.begin(Activity.FORWARD_BACKWARD)
        shares = self.pipeline.forward_backward(self._with_reference(batch), weight, loss_scale)
        progress.begin(Activity.REDUCING)
        self.optimizer.reduce_gradients()
        totals = self._totals(shares, flags)
        loss, learning_rate = totals.loss, self._current_learning_rate()
        progress.begin(Activity.UPDATING)
        before_update()
        spike = self.spikes.update(loss)
        norms = norms_of(self.config, self.replica, self.state.step + 1, self.kernels.operators)
        try:
            update = skip_spike(self.config.training, self.optimizer, loss, spike, totals.squared_norm)
            update = update or self.optimizer.step(learning_rate, totals.squared_norm, norms)
        except TrainingError as error:
            cause = self._nonfinite_output(loss, batch) or error
            raise TrainingError(f"step {self.state.step + 1}: {cause}") from error
        self._require_finite(loss, update, batch)
        samples, rows = self.state.samples, len(batch.input_ids) * self.mesh.batch.size
        load = self.routers.stepped(totals.routers, rows, skipped=update.skipped)
        layers = {} if norms is None or update.skipped else {**norms.totals(), **self.routers.of_layers}
        batch_tokens, global_size = rows * batch.input_ids.shape[1], self.config.batch.global_batch_size
        self.state = self.state.advanced(samples=global_size, tokens=batch_tokens, skipped=update.skipped)
        progress.finished(self.state.step)
        report = StepReport(
            step=self.state.step,
            loss=loss,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            tokens=self.state.tokens,
            batch_tokens=batch_tokens,
            sequence_length=batch.input_ids.shape[1],
            step_seconds=time.perf_counter() - started,
            data_seconds=self._waited_seconds,
            loss_scale=loss_scale,
            skipped_steps=self.state.skipped_steps,
            overflow=update.overflow if update.skipped else None,
            flags=totals.flags,
            figures=dict(zip(self.objective.figures, totals.figures, strict=True)) | load,
            layers=layers,
            epoch=ended_epoch(self.config, self.loader, samples, self.state.samples),
            loss_spike=spike,
            skipped_for=update.skipped_for,
            skipped_samples=(samples, self.state.samples) if update.skipped else None,
        )
        if reached := limit_reached(self.config.training, report, self.state.skipped_in_a_row):
            cause = self._nonfinite_output(loss, batch) or f"{describe_skip(report)}; {REMEDY}"
            raise TrainingError(f"step {self.state.step}: {reached}: {cause}")
        return report

    def _this_batch(self) -> tuple[StepBatch, Tensor]:
        """Return this step's batch and the token weight of the global batch.

        Collective unless the step before has read the batch ahead.
        """
        ahead, self._next = self._next, None
        if ahead is not None and ahead.samples == self.state.samples:
            return ahead.batch.result(), ahead.weight
        batch = self._read(self.state.samples)
        return batch, self.mesh.reduce_over_world(weight_share(batch, self.mesh, self.objective))

    def _read(self, samples: int) -> StepBatch:
        """Wait for the batch after `samples`."""
        started = time.perf_counter()
        progress.begin(Activity.READING_BATCH)
        batch = self.batches.step_batch(samples).ready()
        self._waited_seconds += time.perf_counter() - started
        return batch

    def _totals(self, shares: Tensor, flags: Callable[[], Sequence[bool]]) -> StepTotals:
        """Sum over all ranks what the host must know of this step, and the weight of the batch of the next."""
        ahead: Future[StepBatch] = Future()
        weight = torch.zeros_like(shares[0])
        samples = self.state.samples + self.config.batch.global_batch_size
        more = self.state.step + 1 < self.total_steps
        if more:
            try:
                ahead.set_result(self._read(samples))
                weight = weight_share(ahead.result(), self.mesh, self.objective)
            except Exception as error:
                # The next step raises it, once this one is done.
                ahead.set_exception(error)
        progress.begin(Activity.TOTALLING)
        own = shares, self.optimizer.squared_norm(), weight, flags(), self.routers.take_share()
        totals = total_over_ranks(self.mesh, *own)
        self._next = _NextBatch(samples, ahead, totals.next_weight) if more else None
        return totals

    def _require_finite(self, loss: float, update: Update, batch: StepBatch) -> None:
        if not math.isfinite(loss) and not update.skipped:
            cause = self._nonfinite_output(loss, batch) or (
                f"the loss is {loss}, but its gradient is finite; check the data of this step and"
                " training.z_loss, then run the same command to resume"
            )
            raise TrainingError(f"step {self.state.step + 1}: {cause}")

    def _nonfinite_output(self, loss: float, batch: StepBatch) -> str:
        return nonfinite_cause(self.config, self.replica, loss, partial(self.evaluate, batch))

    def evaluate(self, batch: StepBatch) -> Tensor:
        """Return PipelineRunner.evaluate(batch)."""
        return self.pipeline.evaluate(self._with_reference(batch))

    def _with_reference(self, batch: StepBatch) -> StepBatch:
        """Return the batch with the losses of the model without its adapter, if that is the reference."""
        if not self._reference_is_without_adapter:
            return batch
        return replace(batch, reference=self.pipeline.row_losses(batch, WITHOUT_ADAPTER))

    def draft(self, folder: Path, make: Callable[..., Draft] = draft_checkpoint) -> Draft:
        """List what a checkpoint of this moment has, to be written below `folder`; writes no tensor yet. Collective."""
        record = RunRecord(
            asdict(
                replace(self.state, idle_experts=self.routers.idle_experts, recent_losses=self.spikes.losses)
            ),
            self.config.model_dump(mode="json"),
            self.base,
            gathered_position(self.loader, self.state.samples, self.mesh),
            self.fingerprints,
        )
        return make(folder, self.replica, self.optimizer.state, record)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: weights, optimizer state, and the position in data and schedule.

        Layout, precision, global batch, length, schedule, groups and the optimizer's numbers are those of this run.
        """
        progress.begin(Activity.LOADING)
        if self.base is not None:
            require_base(read_manifest(checkpoint).base, self.base, checkpoint)
        loaded = load_checkpoint(checkpoint, self.replica, self.optimizer.state)
        self.replica.require_weights()
        if unknown := loaded.trainer_state.keys() - asdict(TrainerState()).keys():
            raise CheckpointError(
                f"{checkpoint}: trainer_state has {', '.join(sorted(unknown))}, which this version of megalite does not"
                " know; use the version that wrote it"
            )
        written = self._within_epochs(TrainerState(**loaded.trainer_state), loaded.config)
        self._go_on_from(written)
        self.state = replace(written, recent_losses=[])
        progress.resumed(self.state.step)
        self.learning_rate = schedule_of(self.config, self.total_steps)
        self.batches.close()
        go_on(self.loader, self.state.samples, read_manifest(checkpoint).stream)
        self.batches, self._next = self._training_batches(), None

    def roll_back(self, checkpoint: Path) -> TrainerState:
        """Bring back the weights and the optimizer state of a checkpoint of this run, and return its state. Collective.

        Steps, data and learning rate go on from here.
        """
        progress.begin(Activity.LOADING)
        there = TrainerState(**load_checkpoint(checkpoint, self.replica, self.optimizer.state).trainer_state)
        self.state = self.state.rolled_back(there)
        self._go_on_from(there)
        progress.begin(Activity.BETWEEN_STEPS)
        return there

    def _go_on_from(self, state: TrainerState) -> None:
        self.routers.go_on(state.idle_experts)
        self.spikes.go_on(state.recent_losses)

    def _within_epochs(self, state: TrainerState, written: Mapping[str, Any]) -> TrainerState:
        """Return the state with the samples that the checkpoint's run trained on.

        The last step of its epochs may have rows of the next one, without labels: they come when there are more epochs.
        """
        training = written.get("training") or {}
        epochs = None if training.get("steps") else training.get("epochs")
        # A curriculum counts steps of one size.
        if not epochs or not isinstance(self.loader, StepLoader) or self.config.data.curriculum:
            return state
        return replace(state, samples=min(state.samples, self.loader.samples_in(epochs)))

    def _current_learning_rate(self) -> float:
        # DeepSpeed's schedulers do not advance at an update that is skipped.
        skipped = self.state.skipped_steps if isinstance(self.learning_rate, DeepSpeedSchedule) else 0
        return self.learning_rate(self.state.step - skipped)


def _start_from(start: StartingPoint, config: RunConfig, replica: Replica) -> None:
    """Fill a replica from a Hugging Face folder, and its adapter as it starts unless one is resumed. Collective."""
    if (weights := start.weights) is not None:
        base = open_weights(WeightSource(weights, "huggingface", replica.shape), start.new_rows)
        fill(replica, base, weights, [each for each in replica.parameters if not each.adapter])
        if config.adapter.path is not None and not start.resumed:
            adapter = WeightSource(Path(config.adapter.path).expanduser(), "peft", replica.shape)
            fill(replica, open_weights(adapter), adapter.folder, replica.trained)
        elif replica.shape.adapter is not None and not start.resumed:
            initialise(replica, config.run.seed, adapter_only=True)
    start.prepare(replica)


def _base(config: RunConfig, mesh: ParallelMesh) -> Base:
    """Describe the frozen weights; rank 0 reads samples of them. Collective."""
    weights = config.model.weights
    assert weights is not None, "a rule asks for them"
    base = all_or_none(
        mesh, lambda: base_of(weights) if mesh.rank == 0 else None, explain(mesh, "import", Path(weights))
    )
    described: Base = mesh.broadcast_object(base)
    return described
