"""The training loop: one trainer for every layout and every optimizer."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from torch import Tensor

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.save import Draft, draft_checkpoint
from megalite.config.schema import RunConfig
from megalite.convert.huggingface.load import load_huggingface
from megalite.data.loader import StepLoader
from megalite.data.prefetch import Prefetch
from megalite.data.transfer import ArrivingBatch, BatchTransfer
from megalite.errors import CheckpointError, TrainingError
from megalite.model.kernels import KernelChoice
from megalite.model.stages import build_stage
from megalite.parallel.device import HostCopy
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineShapes, StepBatch, pipeline_runner
from megalite.topology.parameters import stage_parameters
from megalite.topology.shape import ModelShape
from megalite.train.assemble import model_options, optimizer_settings
from megalite.train.kernel_choice import known_kernels
from megalite.train.learning_rate import LearningRate
from megalite.train.optimizer import Optimizer, TorchOptimizer
from megalite.train.state import StepReport, TrainerState


class Trainer:
    """Trains the model of `config` on this rank; every rank of the mesh makes one and calls it alike."""

    def __init__(
        self,
        config: RunConfig,
        mesh: ParallelMesh,
        shape: ModelShape,
        loader: StepLoader,
        *,
        weights: Path | None = None,
        kernels: KernelChoice | None = None,
    ):
        """`weights`: a Hugging Face folder to start from instead of random values. `kernels`: None on a CPU, or where
        this machine's earlier tests are to choose them."""
        self.config, self.mesh, self.shape, self.loader = config, mesh, shape, loader
        self.state = TrainerState()
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step before weights and optimizer state change; nothing else changes them."""
        self.split = config.split
        self.kernels = kernels or known_kernels(config, shape, mesh.device)
        self.options = options = model_options(config, self.kernels.operators)
        self.loss_dtype = options.loss_dtype
        seed = config.run.seed if weights is None else None
        self.stage = build_stage(shape, mesh, self.split, options, seed=seed)
        if weights is not None:
            load_huggingface(weights, mesh=mesh, shape=shape, split=self.split, stage=self.stage)
        self.optimizer = self._build_optimizer()
        self.pipeline = pipeline_runner(
            self.stage.chunks,
            self.split,
            mesh,
            PipelineShapes(
                micro_batches=config.batch.micro_batches,
                hidden_size=shape.hidden_size,
                dtype=options.dtype,
                loss_dtype=options.loss_dtype,
            ),
            schedule=config.parallel.schedule,
            forward=self.optimizer.forward,
        )
        self.transfer = BatchTransfer(mesh.device)
        self.batches = Prefetch(
            partial(self.arriving_batch, loader),
            stride=config.batch.global_batch_size,
            end=self.total_steps * config.batch.global_batch_size,
            workers=config.data.loader_workers,
            depth=config.data.prefetch,
        )
        self.learning_rate = self._schedule()

    @property
    def total_steps(self) -> int:
        """At which step the run ends; of epochs, those that what is left of them makes of today's global batch."""
        training = self.config.training
        if training.steps:
            return training.steps
        after = self.state.samples
        return self.state.step + self.loader.steps_for_epochs(training.epochs or 1.0, after=after)

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch.global_batch_size * self.config.training.sequence_length

    def arriving_batch(self, loader: StepLoader, samples: int) -> ArrivingBatch:
        """What `loader` has for the step after `samples` samples, on its way to the device; for any thread."""
        return self.transfer.start(loader.step_batch(samples, dtype=self.loss_dtype))

    def train_step(self) -> StepReport:
        """One global batch: forward and backward of all micro batches, then one update."""
        started = time.perf_counter()
        batch = self.batches.step_batch(self.state.samples).ready()
        data_seconds = time.perf_counter() - started
        loss_scale = self.optimizer.loss_scale
        with self.optimizer.accumulating():
            loss_on_device = self.pipeline.forward_backward(batch, loss_scale)
        # Read after the gradient norm, for which the host waits anyway.
        told_loss = HostCopy(loss_on_device)
        learning_rate = self.learning_rate(self.state.step)
        self.before_update()
        try:
            update = self.optimizer.step(learning_rate)
        except TrainingError as error:
            raise TrainingError(f"step {self.state.step + 1}: {error}") from error
        loss = told_loss.item()
        if not math.isfinite(loss) and not update.skipped:
            raise TrainingError(
                f"step {self.state.step + 1}: the loss is {loss}, though its gradient is finite; look at the data of "
                "this step, and at training.z_loss, then run again to resume"
            )
        self.state = self.state.advanced(
            samples=self.config.batch.global_batch_size, tokens=self.tokens_per_step, skipped=update.skipped
        )
        self._require_progress(update.overflow)
        return StepReport(
            step=self.state.step,
            loss=loss,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            tokens=self.state.tokens,
            step_seconds=time.perf_counter() - started,
            data_seconds=data_seconds,
            loss_scale=loss_scale,
            skipped_steps=self.state.skipped_steps,
            overflow=update.overflow if update.skipped else None,
        )

    def _require_progress(self, tensor: str | None) -> None:
        limit = self.config.training.nonfinite_limit
        if self.config.training.nonfinite == "skip" and self.state.skipped_in_a_row >= limit:
            raise TrainingError(
                f"step {self.state.step}: the gradient of {tensor} is not finite, and {limit} steps in a row were left"
                " out (training.nonfinite_limit); lower optimizer.learning_rate, or look at the data of these steps,"
                " then run again to resume"
            )

    def evaluate(self, batch: StepBatch) -> Tensor:
        """As of PipelineRunner, in evaluation mode: nothing is dropped, and the loss is the plain cross entropy."""
        self.stage.train(False)
        try:
            return self.pipeline.evaluate(batch)
        finally:
            self.stage.train(True)

    def draft(self, folder: Path) -> Draft:
        """A checkpoint of this moment, to be written to `folder`; collective."""
        return draft_checkpoint(
            folder,
            mesh=self.mesh,
            shape=self.shape,
            split=self.split,
            stage=self.stage,
            optimizer=self.optimizer.state,
            trainer_state=asdict(self.state),
            config=self.config.model_dump(mode="json"),
        )

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: weights, optimizer state, and the position in data and schedule.

        Layout, precision, global batch, length, schedule, groups and the optimizer's numbers are those of this run.
        """
        loaded = load_checkpoint(
            checkpoint,
            mesh=self.mesh,
            shape=self.shape,
            split=self.split,
            stage=self.stage,
            optimizer=self.optimizer.state,
        )
        unknown = loaded.trainer_state.keys() - asdict(TrainerState()).keys()
        if unknown:
            raise CheckpointError(
                f"{checkpoint}: trainer_state has {', '.join(sorted(unknown))}, which this version of megalite does not"
                " know; use the version that wrote it"
            )
        self.state = TrainerState(**loaded.trainer_state)
        self.learning_rate = self._schedule()

    def _schedule(self) -> LearningRate:
        optimizer = self.config.optimizer
        return LearningRate(
            optimizer.learning_rate,
            optimizer.schedule,
            optimizer.warmup_steps,
            optimizer.decay_steps or self.total_steps,
            optimizer.minimum_ratio,
            optimizer.decay_fraction,
            optimizer.decay_shape,
        )

    def _build_optimizer(self) -> Optimizer:
        config = self.config
        parameters = list(stage_parameters(self.shape, self.split, self.mesh.at.pp))
        settings = optimizer_settings(config, self.options)
        if config.zero_stage == 0:
            return TorchOptimizer(self.stage, parameters, self.mesh, settings)
        # DeepSpeed costs seconds to import: only a run that uses it pays.
        from megalite.train.deepspeed import DeepSpeedOptimizer

        return DeepSpeedOptimizer(self.stage, parameters, self.mesh, settings, config.deepspeed_json())
