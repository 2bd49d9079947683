"""Turns the configuration into options of the model and settings of the optimizer."""

from megalite.config.deepspeed.schedule import DeepSpeedSchedule
from megalite.config.deepspeed.scheduler import SCHEDULERS
from megalite.config.sections.schema import RunConfig, TrainingConfig, warmup_of
from megalite.model.options import Dropout, ModelOptions, Recompute
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.objective import NEXT_TOKEN, Objective, Preference
from megalite.topology.learning_rate import LearningRate
from megalite.train.loss_scale import LossScaleSettings
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.precision import DTYPES


def model_options(config: RunConfig, operators: Operators = PLAIN_TORCH) -> ModelOptions:
    """Return how the model computes: dtype, dropout, loss terms, recompute. Its sizes are in the ModelShape."""
    model, training = config.model, config.training
    return ModelOptions(
        dtype=DTYPES[config.training.precision],
        dropout=Dropout(
            embedding=model.embedding_dropout,
            residual=model.residual_dropout,
            mlp=model.mlp_dropout,
            attention=model.attention_dropout,
            adapter=config.adapter.dropout,
        ),
        dropout_seed=config.run.seed,
        label_smoothing=config.training.label_smoothing,
        z_loss=config.training.z_loss,
        recompute=Recompute(training.recompute, training.recompute_layers, training.recompute_ratio),
        compile=training.compile,
        chunked_loss=model.chunked_loss,
        operators=operators,
    )


def objective_of(config: RunConfig) -> Objective:
    """Return what the steps of the run minimise."""
    if config.data.kind != "preference":
        return NEXT_TOKEN
    preference = config.preference
    return Preference(preference.beta, preference.label_smoothing, preference.loss)


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """Return the optimizer's settings without `operators`, which `assemble` adds.

    The learning rate is an argument of `Optimizer.step`.
    """
    optimizer, training = config.optimizer, config.training
    shape = config.model.shape(vocab_size=1)  # names do not depend on the vocabulary
    return OptimizerSettings(
        name=optimizer.name,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        momentum=optimizer.momentum_or_default,
        gradient_clipping=optimizer.gradient_clipping,
        clip_value=optimizer.clip_value,
        groups=tuple(each.group(shape) for each in optimizer.groups),
        ema_decay=optimizer.ema_decay,
        sum_in_fp32=training.accumulation == "fp32",
        skip_nonfinite=training.nonfinite == "skip",
        loss_scale=_loss_scale_settings(training) if training.precision == "fp16" else None,
        native=config.native_optimizer,
    )


def schedule_of(config: RunConfig, total_steps: int) -> LearningRate | DeepSpeedSchedule:
    """Return the learning-rate schedule, which decays until `total_steps` unless optimizer.decay_steps is set."""
    optimizer = config.optimizer
    end, warmup = optimizer.decay_steps or total_steps, warmup_of(optimizer, total_steps)
    if optimizer.schedule == "deepspeed":
        kind, params = config.deepspeed_scheduler
        return DeepSpeedSchedule(SCHEDULERS[kind].rate, optimizer, warmup, end, params)
    return LearningRate(optimizer, warmup, end)


def _loss_scale_settings(training: TrainingConfig) -> LossScaleSettings:
    if training.loss_scale != "dynamic":
        return LossScaleSettings(initial=training.loss_scale, window=None, minimum=training.loss_scale)
    return LossScaleSettings(
        initial=2.0**training.initial_loss_scale_power,
        window=training.loss_scale_window,
        hysteresis=training.loss_scale_hysteresis,
        minimum=float(training.minimum_loss_scale),
    )
