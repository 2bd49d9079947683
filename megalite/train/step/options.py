"""Turns the configuration into options of the model and settings of the optimizer."""

from megalite.config.deepspeed.scheduler import SCHEDULERS
from megalite.config.deepspeed.scheduler_rates import DeepSpeedSchedule
from megalite.config.sections.schema import RunConfig, warmup_of
from megalite.model.options import ModelOptions
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.objective import NEXT_TOKEN, Objective, Preference
from megalite.topology.context import ContextMethod
from megalite.topology.learning_rate import LearningRate
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.step.precision import DTYPES


def model_options(config: RunConfig, operators: Operators = PLAIN_TORCH) -> ModelOptions:
    """Return how the model computes. Its sizes are in the ModelShape."""
    dtype = DTYPES[config.training.precision]
    return ModelOptions(dtype, config.model, config.training, config.adapter, config.run.seed, operators)


def context_method(config: RunConfig) -> ContextMethod:
    """Return how attention sees the tokens of other context-parallel ranks; "auto" is left where there are none."""
    method = config.parallel.context_method
    return "gather" if method == "auto" else method


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
    shape = config.model.shape(vocab_size=1)  # names do not depend on the vocabulary
    groups = tuple(group.group(shape) for group in config.optimizer.groups)
    return OptimizerSettings(config.optimizer, config.training, groups, config.native_optimizer)


def schedule_of(config: RunConfig, total_steps: int) -> LearningRate | DeepSpeedSchedule:
    """Return the learning-rate schedule, which decays until `total_steps` unless optimizer.decay_steps is set."""
    optimizer = config.optimizer
    end, warmup = optimizer.decay_steps or total_steps, warmup_of(optimizer, total_steps)
    if optimizer.schedule == "deepspeed":
        kind, params = config.deepspeed_scheduler
        return DeepSpeedSchedule(SCHEDULERS[kind].rate, optimizer, warmup, end, params)
    return LearningRate(optimizer, warmup, end)
