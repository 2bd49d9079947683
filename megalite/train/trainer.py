"""The training loop: one trainer for every layout and every optimizer."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.hf_import import load_huggingface
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.save import save_checkpoint
from megalite.config.schema import RunConfig, TrainingConfig
from megalite.data.loader import StepLoader
from megalite.errors import TrainingError
from megalite.model.options import Dropout, ModelOptions, Recompute
from megalite.model.stages import build_stage
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineShapes, pipeline_runner
from megalite.topology.parameters import ModelShape, stage_parameters
from megalite.topology.schedules import SCHEDULES
from megalite.train.learning_rate import LearningRate
from megalite.train.loss_scale import LossScaleSettings
from megalite.train.optimizer import Optimizer, OptimizerSettings, TorchOptimizer
from megalite.train.precision import DTYPES


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands. The data position is `samples`, one global counter."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0

    def advanced(self, *, samples: int, tokens: int, skipped: bool) -> "TrainerState":
        return TrainerState(
            self.step + 1, self.samples + samples, self.tokens + tokens, self.skipped_steps + skipped
        )


@dataclass(frozen=True)
class StepReport:
    """What one step gave: the loss before its update, the gradient norm before clipping, and its time.

    loss_scale: of this step. overflow: the tensor where an overflow arose that made the optimizer leave the step out.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_seconds: float
    loss_scale: float = 1.0
    skipped_steps: int = 0
    overflow: str | None = None


def model_options(config: RunConfig) -> ModelOptions:
    """All that the configuration has to say to the model beyond its shape."""
    model, parallel, training = config.model, config.parallel, config.training
    return ModelOptions(
        dtype=DTYPES[config.training.precision],
        split_backward=parallel.pipeline > 1 and SCHEDULES[parallel.schedule].splits_backward,
        dropout=Dropout(
            embedding=model.embedding_dropout,
            residual=model.residual_dropout,
            mlp=model.mlp_dropout,
            attention=model.attention_dropout,
        ),
        dropout_seed=config.run.seed,
        label_smoothing=config.training.label_smoothing,
        z_loss=config.training.z_loss,
        recompute=Recompute(training.recompute, training.recompute_layers, training.recompute_ratio),
        compile=training.compile,
    )


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """All that the configuration has to say to the optimizer."""
    optimizer, training = config.optimizer, config.training
    return OptimizerSettings(
        name=optimizer.name,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        momentum=optimizer.momentum,
        gradient_clipping=optimizer.gradient_clipping,
        clip_value=optimizer.clip_value,
        groups=tuple(each.group for each in optimizer.groups),
        ema_decay=optimizer.ema_decay,
        accumulate_wide=training.accumulation == "fp32",
        loss_scale=_loss_scale_settings(training) if training.precision == "fp16" else None,
        native=config.native_optimizer,
    )


def _loss_scale_settings(training: TrainingConfig) -> LossScaleSettings:
    if training.loss_scale != "dynamic":
        return LossScaleSettings(initial=training.loss_scale, window=None, minimum=training.loss_scale)
    return LossScaleSettings(
        initial=2.0**training.initial_loss_scale_power,
        window=training.loss_scale_window,
        hysteresis=training.loss_scale_hysteresis,
        minimum=float(training.minimum_loss_scale),
    )


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
    ):
        """`weights`: a Hugging Face folder to start from instead of random values."""
        self.config, self.mesh, self.shape, self.loader = config, mesh, shape, loader
        self.state = TrainerState()
        self.split = config.split
        options = model_options(config)
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
        self.learning_rate = LearningRate(
            config.optimizer.learning_rate,
            config.optimizer.schedule,
            config.optimizer.warmup_steps,
            config.optimizer.decay_steps or self.total_steps,
            config.optimizer.minimum_ratio,
            config.optimizer.decay_fraction,
            config.optimizer.decay_shape,
        )

    @property
    def total_steps(self) -> int:
        training = self.config.training
        return training.steps or self.loader.steps_for_epochs(training.epochs or 1.0)

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch.global_batch_size * self.config.training.sequence_length

    def train_step(self) -> StepReport:
        """One global batch: forward and backward of all micro batches, then one update."""
        started = time.perf_counter()
        batch = self.loader.step_batch(self.state.samples, dtype=self.loss_dtype)
        loss_scale = self.optimizer.loss_scale
        with self.optimizer.accumulating():
            loss = self.pipeline.forward_backward(batch, loss_scale)
        learning_rate = self.learning_rate(self.state.step)
        try:
            update = self.optimizer.step(learning_rate)
        except TrainingError as error:
            raise TrainingError(f"step {self.state.step + 1}: {error}") from error
        self.state = self.state.advanced(
            samples=self.config.batch.global_batch_size, tokens=self.tokens_per_step, skipped=update.skipped
        )
        return StepReport(
            step=self.state.step,
            loss=loss,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            tokens=self.state.tokens,
            step_seconds=time.perf_counter() - started,
            loss_scale=loss_scale,
            skipped_steps=self.state.skipped_steps,
            overflow=update.overflow if update.skipped else None,
        )

    def save(self, folder: Path) -> Path:
        """Write `folder`/step-NNNNNN as one checkpoint of the whole job; collective."""
        return save_checkpoint(
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
        """Go on from a checkpoint: weights, optimizer state, and the position in data and schedule."""
        loaded = load_checkpoint(
            checkpoint,
            mesh=self.mesh,
            shape=self.shape,
            split=self.split,
            stage=self.stage,
            optimizer=self.optimizer.state,
        )
        self.state = TrainerState(**loaded.trainer_state)

    def _build_optimizer(self) -> Optimizer:
        config = self.config
        parameters = list(stage_parameters(self.shape, self.split, self.mesh.at.pp))
        settings = optimizer_settings(config)
        if config.zero_stage == 0:
            return TorchOptimizer(self.stage, parameters, self.mesh, settings)
        # DeepSpeed costs seconds to import: only a run that uses it pays.
        from megalite.train.deepspeed import DeepSpeedOptimizer

        return DeepSpeedOptimizer(self.stage, parameters, self.mesh, settings, config.deepspeed_json())
