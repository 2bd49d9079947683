"""Read the scheduler block of DeepSpeed's JSON into [optimizer] and [deepspeed.scheduler]."""

from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import VERSION
from megalite.config.deepspeed.schedulers import MOMENTUM, REQUIRED, SCHEDULERS, TORCH_SCHEDULERS
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft, did_you_mean

_RATIOS = "set learning_rate_ratio in [[optimizer.groups]]"
_PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")
# Parameters of [deepspeed.scheduler.params] -> the kind of their value.
_KINDS = {
    "warmup_min_lr": "number",
    "warmup_min_ratio": "fraction",
    "warmup_type": "log or linear",
    "cycle_min_lr": "number",
    "decay_lr_rate": "number",
    "cycle_first_step_size": "positive",
    "cycle_second_step_size": "count",
    "cycle_first_stair_count": "count",
    "cycle_second_stair_count": "count",
    "decay_step_size": "count",
    "lr_range_test_step_size": "positive",
    "lr_range_test_step_rate": "number",
    "lr_range_test_staircase": "bool",
}


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
    params = table.get("params") if scheduler else None
    if scheduler is None:
        return None
    given = params if isinstance(params, dict) else {}
    for name in _PEAKS:
        if name in scheduler.ours and given.get(name, scheduler.defaults[name]) not in (None, AUTO):
            return name
    return None


def _unsupported(kind: Any) -> tuple[str, str]:
    remedy = did_you_mean(str(kind), SCHEDULERS) or f"use one of {', '.join(SCHEDULERS)}"
    if str(kind) in TORCH_SCHEDULERS:
        return f"megalite does not support {shown(kind)}", remedy
    return f"DeepSpeed {VERSION} has no scheduler {shown(kind)}", remedy


def _read_params(draft: SettingsDraft, block: Block, kind: str, params: dict[str, Any]) -> dict[str, Any]:
    scheduler = SCHEDULERS[kind]
    for name in params:
        key = block.key(f"scheduler.params.{name}")
        if name == "last_batch_iteration":
            if params[name] not in (-1, AUTO):
                draft.problem(key, f"megalite does not support {shown(params[name])}", "use -1, or remove it")
        elif name not in scheduler.defaults:
            remedy = did_you_mean(name, scheduler.defaults) or f"it has {', '.join(scheduler.defaults)}"
            draft.problem(key, f"{kind} has no such parameter in DeepSpeed {VERSION}", remedy)
    found: dict[str, Any] = {}
    for name, default in scheduler.defaults.items():
        path = f"scheduler.params.{name}"
        value = params.get(name, default)
        if value is REQUIRED:
            remedy = 'write "auto" for the last step of the run' if name == "total_num_steps" else "add it"
            draft.problem(block.key(path), f"is required by {kind}", remedy)
        elif isinstance(value, list) and name not in MOMENTUM:
            message = f"megalite does not support {shown(value)}, a number for each group"
            draft.problem(block.key(path), message, f"write one number, and {_RATIOS}")
        elif name in scheduler.ours:
            _read_ours(draft, block, path, scheduler.ours[name], value, given=name in params)
            found[name] = AUTO
        elif name not in (*MOMENTUM, "cycle_momentum"):
            found[name] = default if value == AUTO else value
    if kind == "OneCycle":
        for part in ("step_size", "stair_count"):
            if found.get(f"cycle_second_{part}") is None:
                found[f"cycle_second_{part}"] = found.get(f"cycle_first_{part}")
        found["cycle_momentum"] = False
        _require_constant_momentum(draft, block, params)
    for name, value in found.items():
        if name in _KINDS and (problem := problem_of(_KINDS[name], value)):
            draft.problem(block.key(f"scheduler.params.{name}"), *problem)
    return found


def _read_ours(draft: SettingsDraft, block: Block, path: str, key: str, value: Any, *, given: bool) -> None:
    if not given and key == "warmup_steps" and draft.has("optimizer", "warmup_ratio"):
        return  # the run says its warm-up, which DeepSpeed's default must not contradict
    if not given:
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
