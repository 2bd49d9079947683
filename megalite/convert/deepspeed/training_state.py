"""The state of a run of DeepSpeed's engine beside its tensors, in our words: counters, loss scale, hyperparameters."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megalite.convert.deepspeed.engine_states import EngineStates, optimizer_type
from megalite.convert.deepspeed.rank_states import whole_number
from megalite.convert.foreign_pickle import Foreign
from megalite.errors import listed

_SETTINGS = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
"""DeepSpeed's and torch's name of a hyperparameter -> ours."""


def counters(states: EngineStates) -> dict[str, int]:
    """Return the trainer state: steps, skipped steps and samples of all data-parallel ranks; tokens are not known."""
    names = {"step": "global_steps", "skipped_steps": "skipped_steps", "samples": "global_samples"}
    return {**{ours: states.model.count(theirs) for ours, theirs in names.items()}, "tokens": 0}


def loss_scale(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dynamic loss scale of fp16 as `LossScale.load` takes it; {} with a fixed one or another precision.

    table: a state dict of DeepSpeed's optimizers, which keep a DynamicLossScaler (ZeRO) or its fields (ZeRO 0).
    """
    scaler = table.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, Foreign) else table
    dynamic = fields.get("dynamic", fields.get("dynamic_loss_scale"))
    scale, window = _number(fields.get("cur_scale")), whole_number(fields.get("scale_window"))
    done, overflow = (whole_number(fields.get(key)) for key in ("cur_iter", "last_overflow_iter"))
    if dynamic is not True or scale is None or not window or done is None or overflow is None:
        return {}
    # Theirs doubles at the first step for which the steps without an overflow before it are a multiple of the window.
    clean = max(0, done - overflow - 1)
    return {
        "loss_scale": scale,
        "loss_scale_steps_since_change": (clean - 1) % window if clean else -1,
        "loss_scale_overflows_left": max(1, whole_number(fields.get("cur_hysteresis")) or 1),
    }


def settings(states: EngineStates) -> dict[str, Any]:
    """Return the optimizer's settings; the learning rate is the configured one, before its schedule, if it is known."""
    group = dict(states.trained.param_groups[0]) if states.trained.param_groups else {}
    configured = states.model.settings.get("optimizer")
    configured = configured.get("params") if isinstance(configured, Mapping) else None
    peak = _plain(configured.get("lr")) if isinstance(configured, Mapping) else None
    group["lr"] = next(
        (lr for lr in (peak, group.get("initial_lr"), group.get("lr")) if lr is not None), None
    )
    values = {ours: _plain(group.get(theirs)) for theirs, ours in _SETTINGS.items()}
    clip = _number(states.model.settings.get("gradient_clipping")) or _number(
        states.trained.table.get("clip_grad")
    )
    values["gradient_clipping"] = clip if clip else None
    return {name: value for name, value in values.items() if value is not None}


def notes(states: EngineStates) -> Iterator[str]:
    """Yield what a user who goes on with the run here has to know."""
    if values := settings(states):
        yield f"trained with {', '.join(f'optimizer.{name} = {value}' for name, value in values.items())}"
    yield from _group_notes(states)
    if states.frozen:
        yield (
            f"frozen parameters ({listed(sorted(states.frozen))}) have moments of zero; here they are trained, unless"
            " [[optimizer.groups]] gives them learning_rate_ratio = 0"
        )
    if optimizer_type(states.model.settings).lower() == "adam" and _is_l2(states):
        yield "weight decay was part of the gradient (Adam, not AdamW), which optimizer.name = adamw does not do"
    if states.trained.stage == 0 and "fp32_groups" not in states.trained.table:
        yield "ZeRO 0 does not name the optimizer's parameters: they are taken in the order of the model's weights"
    yield from _schedule_notes(states)


def _group_notes(states: EngineStates) -> Iterator[str]:
    """Yield the weight decay of parameters that do not have the first group's."""
    rates: dict[tuple[Any, Any], list[str]] = {}
    for name in states.trained.names:
        group = states.trained.group_of(name)
        rates.setdefault((_plain(group.get("lr")), _plain(group.get("weight_decay"))), []).append(name)
    first, *others = rates.items() if rates else [((None, None), [])]
    for (rate, decay), names in others:
        different = f", learning rate {rate} beside {first[0][0]}" if rate != first[0][0] else ""
        yield f"weight decay {decay}{different}: {len(names)} parameters ({listed(names)})"
    if not others and first[0][1]:
        yield (
            f"weight decay {first[0][1]} applied to norms and biases too; here it does so with [[optimizer.groups]]"
            f' pattern = "*", weight_decay = {first[0][1]}'
        )


def _schedule_notes(states: EngineStates) -> Iterator[str]:
    """Yield the position of the learning-rate schedule where it is not that of the step."""
    scheduler = states.model.table.get("lr_scheduler")
    last = whole_number(scheduler.get("last_batch_iteration")) if isinstance(scheduler, Mapping) else None
    step, skipped = states.model.count("global_steps"), states.model.count("skipped_steps")
    if skipped:
        yield f"{skipped} of its steps were skipped; here a schedule of DeepSpeed's does not count them, any other does"
    if last is not None and last + 1 != step - skipped:
        yield f"its learning-rate schedule was after update {last + 1}; here it is after step {step}"


def _is_l2(states: EngineStates) -> bool:
    section = states.model.settings.get("optimizer")
    parameters = section.get("params") if isinstance(section, Mapping) else None
    decays = any(_number(group.get("weight_decay")) for group in states.trained.param_groups)
    return decays and isinstance(parameters, Mapping) and parameters.get("adam_w_mode") is False


def _number(value: object) -> float | None:
    plain = _plain(value)
    return plain if isinstance(plain, float) else None


def _plain(value: object) -> float | list[float] | None:
    """A number, which may stand in a tensor, or a list of them; None for anything else."""
    if isinstance(value, list | tuple):
        numbers = [each for each in map(_number, value) if each is not None]
        return numbers if len(numbers) == len(value) else None
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None
