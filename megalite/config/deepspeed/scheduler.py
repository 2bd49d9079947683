"""DeepSpeed's schedulers, and how the scheduler block becomes [optimizer] and [deepspeed.scheduler]."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import VERSION
from megalite.config.deepspeed.scheduler_rates import DeepSpeedSchedule, SchedulerRate
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft, did_you_mean

REQUIRED = object()
"""A parameter without a default: DeepSpeed stops where it is missing."""


@dataclass(frozen=True)
class SchedulerParameter:
    """A parameter of one of DeepSpeed's schedulers.

    default: DeepSpeed's; None stands for the optimizer's own learning rate, or for the first half's value in OneCycle.
    kind: a word of values.py. ours: the key of [optimizer] that holds the value. Without kind and ours the parameter
    has no effect while cycle_momentum is false.
    """

    default: Any
    kind: str = ""
    ours: str = ""


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of DeepSpeed: its rate at an iteration, and its parameters by name."""

    rate: SchedulerRate
    parameters: Mapping[str, SchedulerParameter]


_WARMUP = {
    "warmup_num_steps": SchedulerParameter(1000, ours="warmup_steps"),
    "warmup_type": SchedulerParameter("log", "log or linear"),
}
_DECAY = {"total_num_steps": SchedulerParameter(REQUIRED, ours="decay_steps")}

SCHEDULERS: dict[str, Scheduler] = {
    "WarmupLR": Scheduler(
        DeepSpeedSchedule.warmup_then_constant,
        {
            "warmup_min_lr": SchedulerParameter(0.0, "number"),
            "warmup_max_lr": SchedulerParameter(None, ours="learning_rate"),
            **_WARMUP,
        },
    ),
    "WarmupDecayLR": Scheduler(
        DeepSpeedSchedule.warmup_then_line,
        {
            **_DECAY,
            "warmup_min_lr": SchedulerParameter(0.0, "number"),
            "warmup_max_lr": SchedulerParameter(0.001, ours="learning_rate"),
            **_WARMUP,
        },
    ),
    "WarmupCosineLR": Scheduler(
        DeepSpeedSchedule.warmup_then_cosine,
        {
            **_DECAY,
            "warmup_min_ratio": SchedulerParameter(0.0, "fraction"),
            "cos_min_ratio": SchedulerParameter(0.0001, ours="minimum_ratio"),
            **_WARMUP,
        },
    ),
    "OneCycle": Scheduler(
        DeepSpeedSchedule.one_cycle,
        {
            "cycle_min_lr": SchedulerParameter(REQUIRED, "number"),
            "cycle_max_lr": SchedulerParameter(REQUIRED, ours="learning_rate"),
            "decay_lr_rate": SchedulerParameter(0.0, "number"),
            "cycle_first_step_size": SchedulerParameter(2000, "positive"),
            "cycle_second_step_size": SchedulerParameter(None, "count"),
            "cycle_first_stair_count": SchedulerParameter(0, "count"),
            "cycle_second_stair_count": SchedulerParameter(None, "count"),
            "decay_step_size": SchedulerParameter(0, "count"),
            "cycle_momentum": SchedulerParameter(True),
            "cycle_min_mom": SchedulerParameter(0.8),
            "cycle_max_mom": SchedulerParameter(0.9),
            "decay_mom_rate": SchedulerParameter(0.0),
        },
    ),
    "LRRangeTest": Scheduler(
        DeepSpeedSchedule.range_test,
        {
            "lr_range_test_min_lr": SchedulerParameter(0.001, ours="learning_rate"),
            "lr_range_test_step_size": SchedulerParameter(2000, "positive"),
            "lr_range_test_step_rate": SchedulerParameter(1.0, "number"),
            "lr_range_test_staircase": SchedulerParameter(False, "bool"),
        },
    ),
}
"""Classes of deepspeed.runtime.lr_schedules. `last_batch_iteration`, which each takes, must be -1: a new scheduler."""

_OF_TORCH = (
    *("ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("ExponentialLR", "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR"),
)
"""Names that DeepSpeed looks up in torch.optim.lr_scheduler."""


def read_scheduler(draft: SettingsDraft, block: Block, table: Any) -> dict[str, Any] | None:
    """Set optimizer.schedule and the parameters that [optimizer] holds; return [deepspeed.scheduler], None without one.

    A parameter that the block leaves out has DeepSpeed's default, unless RUN.toml sets its key of [optimizer].
    """
    if not isinstance(table, dict) or not table:
        return None
    kind = table.get("type", AUTO)
    if kind == AUTO:
        draft.notes.append(f"{block.key('scheduler')} has no effect: DeepSpeed ignores it without a type")
        return None
    if not isinstance(kind, str) or kind not in SCHEDULERS:
        draft.problem(block.key("scheduler.type"), *_unsupported(kind))
        return None
    if draft.has("optimizer", "schedule") and draft.values["optimizer"]["schedule"] != "deepspeed":
        message = f"{shown(draft.values['optimizer']['schedule'])} ({draft.origin('optimizer.schedule')}) is another "
        message += f"schedule than {kind} ({block.origin('scheduler.type')})"
        draft.problem("optimizer.schedule", message, "remove one of the two")
    else:
        block.take(draft, "scheduler.type", "optimizer", "schedule", "deepspeed")
    params = table.get("params", {})
    return (
        {"type": kind, "params": _read_params(draft, block, kind, params)}
        if isinstance(params, dict)
        else None
    )


def sets_the_peak(table: Any) -> str | None:
    """Return the parameter with which the scheduler replaces the optimizer's learning rate; None where it does not."""
    scheduler = SCHEDULERS.get(str(table.get("type"))) if isinstance(table, dict) else None
    if scheduler is None:
        return None
    params = table.get("params")
    written = params if isinstance(params, dict) else {}
    for name, parameter in scheduler.parameters.items():
        if parameter.ours == "learning_rate" and written.get(name, parameter.default) not in (None, AUTO):
            return name
    return None


def _unsupported(kind: Any) -> tuple[str, str]:
    remedy = did_you_mean(str(kind), SCHEDULERS) or f"use one of {', '.join(SCHEDULERS)}"
    if str(kind) in _OF_TORCH:
        return f"megalite does not support {shown(kind)}", remedy
    return f"DeepSpeed {VERSION} has no scheduler {shown(kind)}", remedy


def _read_params(draft: SettingsDraft, block: Block, kind: str, params: dict[str, Any]) -> dict[str, Any]:
    scheduler = SCHEDULERS[kind].parameters
    for name in params:
        key = block.key(f"scheduler.params.{name}")
        if name == "last_batch_iteration":
            if params[name] not in (-1, AUTO):
                draft.problem(key, f"megalite does not support {shown(params[name])}", "use -1, or remove it")
        elif name not in scheduler:
            remedy = did_you_mean(name, scheduler) or f"it has {', '.join(scheduler)}"
            draft.problem(key, f"{kind} has no such parameter in DeepSpeed {VERSION}", remedy)
    handed: dict[str, Any] = {}
    for name, parameter in scheduler.items():
        path = f"scheduler.params.{name}"
        value = params.get(name, parameter.default)
        if value == AUTO and parameter.kind:
            value = parameter.default
        if value is REQUIRED:
            remedy = 'write "auto" for the last step of the run' if name == "total_num_steps" else "add it"
            draft.problem(block.key(path), f"is required by {kind}", remedy)
        elif isinstance(value, list) and (parameter.ours or parameter.kind):
            message = f"megalite does not support {shown(value)}, a number for each group"
            remedy = "write one number, and set learning_rate_ratio in [[optimizer.groups]]"
            draft.problem(block.key(path), message, remedy)
        elif parameter.ours:
            _read_ours(draft, block, path, parameter.ours, value, written=name in params)
            handed[name] = AUTO
        elif parameter.kind:
            handed[name] = value
    if kind == "OneCycle":
        for part in ("step_size", "stair_count"):
            if handed.get(f"cycle_second_{part}") is None:
                handed[f"cycle_second_{part}"] = handed.get(f"cycle_first_{part}")
        handed["cycle_momentum"] = False
        _require_constant_momentum(draft, block, params)
    for name, value in handed.items():
        if (kind_of_value := scheduler[name].kind) and (problem := problem_of(kind_of_value, value)):
            draft.problem(block.key(f"scheduler.params.{name}"), *problem)
    return handed


def _read_ours(draft: SettingsDraft, block: Block, path: str, key: str, value: Any, *, written: bool) -> None:
    if not written and key == "warmup_steps" and draft.has("optimizer", "warmup_ratio"):
        return  # the run says its warm-up, which DeepSpeed's default must not contradict
    if not written:
        block.fill(draft, path, "optimizer", key, value)
    elif key == "warmup_steps" and value != AUTO and (problem := problem_of("positive", value)):
        draft.problem(block.key(path), *problem)
    else:
        block.take(draft, path, "optimizer", key, value)


def _require_constant_momentum(draft: SettingsDraft, block: Block, params: dict[str, Any]) -> None:
    optimizer = block.values.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    sgd = str(draft.section("optimizer").get("name", kind)).lower() == "sgd"
    # DeepSpeed itself leaves the momentum of an optimizer without betas alone.
    if params.get("cycle_momentum", True) is not False and not sgd:
        draft.problem(
            block.key("scheduler.params.cycle_momentum"),
            "megalite does not support true, DeepSpeed's default, which changes betas at every update",
            'write "cycle_momentum": false',
        )
