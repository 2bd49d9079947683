"""Rules over [optimizer]: parameter groups, clipping, moving average, learning-rate schedule; and the loss scale."""

from collections.abc import Iterable, Iterator

from megalite.config.rules.pipeline import split_of
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import adapted_shape
from megalite.config.sections.schema import OptimizerConfig, warmup_of
from megalite.config.sections.toml import shown
from megalite.errors import Problem
from megalite.topology.optimizers import OPTIMIZERS, OptimizerRecord, optimizers_with
from megalite.topology.parameter_groups import group_problems, update_rules
from megalite.topology.parameters import model_parameters, stage_parameters


def patterns_choose_whole_parameters(run: CheckedRun) -> Iterator[Problem]:
    if run.optimizer.groups:
        shape = adapted_shape(run)
        groups = [each.group(shape.base) for each in run.optimizer.groups]
        trained = [each for each in model_parameters(shape) if each.trained]
        for message in group_problems(trained, groups):
            remedy = (
                f"match whole parameters by the names of {shape.family}'s files (megalite convert families)"
            )
            yield Problem("optimizer.groups", message, remedy)


def zero_finds_every_group_on_every_stage(run: CheckedRun) -> Iterator[Problem]:
    """DeepSpeed's norm is one collective per group over all stages: stages with unequal groups would deadlock."""
    stages = run.parallel.pipeline
    unequal = bool(run.optimizer.groups) or run.adapter.kind != "none"
    if not unequal or not run.zero_stage or stages == 1:
        return
    split = split_of(run)
    if split is None:
        return
    shape = adapted_shape(run)
    groups = [each.group(shape.base) for each in run.optimizer.groups]
    of_stages = [
        update_rules((each for each in stage_parameters(shape, split, stage) if each.trained), groups)
        for stage in range(stages)
    ]
    missing = {rule for each in of_stages for rule in each if not all(rule in other for other in of_stages)}
    if missing:
        group, _ = min(missing)
        name = (
            "parameters without a group" if group < 0 else f'parameters that match "{groups[group].pattern}"'
        )
        message = (
            f"{name} are not on each of the {stages} stages, but DeepSpeed needs every group on every stage"
        )
        remedy = 'choose patterns that match on every stage, such as "*norm*", or delete [deepspeed]'
        key = "optimizer.groups" if run.optimizer.groups else "adapter.modules_to_save"
        yield Problem(key, message, remedy)


def values_are_clipped_without_zero(run: CheckedRun) -> Iterator[Problem]:
    limit, stage = run.optimizer.clip_value, run.zero_stage
    if limit and stage:
        message = (
            f"{limit} is not supported with ZeRO {stage}: DeepSpeed clips in its own step, and only by norm"
        )
        yield Problem.reset(
            "optimizer.clip_value", message, "use 0, and optimizer.gradient_clipping instead", 0.0
        )


def the_native_optimizer_is_adamw_under_zero(run: CheckedRun) -> Iterator[Problem]:
    if run.deepspeed.get("native_optimizer") is not True:
        return
    key, name = "deepspeed.native_optimizer", run.optimizer.name
    if not run.zero_stage:
        message = "true has no effect without ZeRO: DeepSpeed is used only for ZeRO"
        yield Problem.reset(
            key, message, "set deepspeed.zero_optimization.stage to 1, 2 or 3, or use false", False
        )
    if not OPTIMIZERS[name].native:
        native = _names(record for record in OPTIMIZERS.values() if record.native)
        yield Problem.reset(
            key,
            f'true has no effect: DeepSpeed has no compiled form of optimizer.name = "{name}"',
            f"use optimizer.name {native}, or false",
            False,
        )


def ema_works_without_zero_3(run: CheckedRun) -> Iterator[Problem]:
    decay, stage = run.optimizer.ema_decay, run.zero_stage
    if decay and stage == 3:
        message = f"{decay} is not supported with ZeRO 3: no rank holds the updated weights to average"
        yield Problem.reset(
            "optimizer.ema_decay", message, "use 0, or deepspeed.zero_optimization.stage 1 or 2", 0.0
        )


def the_warmup_is_said_once(run: CheckedRun) -> Iterator[Problem]:
    steps, ratio = run.optimizer.warmup_steps, run.optimizer.warmup_ratio
    if steps and ratio:
        source = run.source("optimizer.warmup_steps")
        message = f"{ratio} is set together with optimizer.warmup_steps = {steps} {source}"
        yield Problem.reset("optimizer.warmup_ratio", message, "set only one of them")


def the_stable_rate_follows_the_warmup(run: CheckedRun) -> Iterator[Problem]:
    optimizer, (warmup, said) = run.optimizer, _warmup(run)
    end = optimizer.decay_steps or run.training.steps
    if optimizer.schedule != "wsd" or end is None or warmup >= end:
        return
    start = round(end * (1 - optimizer.decay_fraction))
    if warmup > start:
        message = (
            f"{optimizer.decay_fraction} of {end} steps begins the decay after step {start}, "
            f"before the end of {said}"
        )
        yield Problem(
            "optimizer.decay_fraction",
            message,
            f"use at most {1 - warmup / end:.2g}, or optimizer.warmup_steps {start}",
            {"optimizer.warmup_steps": start, "optimizer.warmup_ratio": None},
        )


def _warmup(run: CheckedRun) -> tuple[int, str]:
    """Return the steps of warm-up, 0 for a share of an unknown number of steps, and the setting as a message has it."""
    optimizer, steps = run.optimizer, run.training.steps or 0
    warmup = warmup_of(optimizer, steps)
    if optimizer.warmup_steps or not optimizer.warmup_ratio:
        return warmup, f"optimizer.warmup_steps = {warmup}"
    return (
        warmup,
        f"the warm-up of {warmup} steps (optimizer.warmup_ratio = {optimizer.warmup_ratio} of {steps})",
    )


def the_loss_scale_starts_above_its_minimum(run: CheckedRun) -> Iterator[Problem]:
    training = run.training
    power, minimum = training.initial_loss_scale_power, training.minimum_loss_scale
    if training.loss_scale == "dynamic" and minimum > 2**power:
        message = f"{minimum} is more than 2 ** training.initial_loss_scale_power {power} = {2**power}"
        yield Problem.reset("training.minimum_loss_scale", message, f"use at most {2**power}", 2**power)


def deepspeeds_schedule_is_there(run: CheckedRun) -> Iterator[Problem]:
    if run.optimizer.schedule == "deepspeed" and "scheduler" not in run.deepspeed:
        message = '"deepspeed" needs a scheduler in DeepSpeed\'s JSON or in [deepspeed.scheduler]'
        yield Problem.reset("optimizer.schedule", message, 'add one, or use "cosine"', "cosine")


def decay_follows_the_warmup(run: CheckedRun) -> Iterator[Problem]:
    (warmup, said), end = _warmup(run), run.optimizer.decay_steps
    if end is not None and end <= warmup and run.optimizer.schedule != "deepspeed":
        message = f"{end} is not more than {said}"
        yield Problem.reset("optimizer.decay_steps", message, f"use {warmup + 1} or more", warmup + 1)


def settings_are_read_by_the_optimizer(run: CheckedRun) -> Iterator[Problem]:
    name = run.optimizer.name
    for setting in dict.fromkeys(setting for record in OPTIMIZERS.values() for setting in record.settings):
        value, default = getattr(run.optimizer, setting), OptimizerConfig.model_fields[setting].default
        # The run.toml of a run without momentum has 0.
        if setting not in OPTIMIZERS[name].settings and value not in (default, 0):
            message = f'{shown(value)} has no effect with optimizer.name = "{name}"'
            others = _names(optimizers_with(setting))
            yield Problem.reset(f"optimizer.{setting}", message, f"delete it, or use optimizer.name {others}")


def zero_cuts_no_matrix_of_the_optimizer(run: CheckedRun) -> Iterator[Problem]:
    name, stage = run.optimizer.name, run.zero_stage
    if OPTIMIZERS[name].whole_matrices and stage:
        message = f'"{name}" is not supported with ZeRO {stage}: its partitions cut through matrices'
        others = [record for record in OPTIMIZERS.values() if not record.whole_matrices]
        remedy = f"use {_names(others)}, or delete [deepspeed]"
        yield Problem.reset("optimizer.name", message, remedy, others[0].name)


def the_run_ends_in_the_warmup(run: CheckedRun) -> Iterator[str]:
    warmup, steps = run.optimizer.warmup_steps, run.training.steps
    if steps is not None and warmup >= steps:
        yield f"the run ends in the warm-up: optimizer.warmup_steps = {warmup}, training.steps = {steps}"


def an_optimizer_has_its_momentum(run: CheckedRun) -> Iterator[str]:
    # The run.toml of a run with another optimizer has 0.
    name = run.optimizer.name
    if (default := OPTIMIZERS[name].momentum) and run.optimizer.momentum == 0:
        yield f"{name} runs without momentum: optimizer.momentum = 0; its default is {default}"


def _names(records: Iterable[OptimizerRecord]) -> str:
    """Return the names of optimizers for a remedy: "adamw", "sgd" or "lion"."""
    *names, last = (f'"{record.name}"' for record in records)
    return f"{', '.join(names)} or {last}" if names else last
