"""The state of a run of DeepSpeed's engine beside its tensors, in our words: counters, loss scale, hyperparameters."""

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.convert.deepspeed.adam_settings import settings
from megalite.convert.deepspeed.engine_states import EngineStates
from megalite.convert.deepspeed.rank_states import whole_number
from megalite.convert.foreign.adamw import group_notes, number, trained_with
from megalite.convert.foreign.unpickle import Foreign
from megalite.convert.universal.folder import WEIGHTS
from megalite.errors import listed


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
    scale, window = number(fields.get("cur_scale")), whole_number(fields.get("scale_window"))
    done, overflow = (whole_number(fields.get(key)) for key in ("cur_iter", "last_overflow_iter"))
    if dynamic is not True or scale is None or scale <= 0 or not window or done is None or overflow is None:
        return {}
    # Theirs doubles at the first step for which the steps without an overflow before it are a multiple of the window.
    clean = max(0, done - overflow - 1)
    return {
        "loss_scale": scale,
        "loss_scale_steps_since_change": (clean - 1) % window if clean else -1,
        "loss_scale_overflows_left": max(1, whole_number(fields.get("cur_hysteresis")) or 1),
    }


def settings_of_engine(states: EngineStates) -> dict[str, Any]:
    """Return the optimizer's settings in our words."""
    return settings(states.trained.param_groups, states.model.settings, states.trained.table)


def notes(states: EngineStates) -> Iterator[str]:
    """Yield what a user who goes on with the run here has to know."""
    yield from trained_with(settings_of_engine(states))
    names = states.trained.names
    vectors = [name for name in names if len(states.size(name, WEIGHTS)) == 1]
    yield from group_notes({name: states.trained.group_of(name) for name in names}, vectors)
    if states.frozen:
        yield (
            f"frozen parameters ({listed(sorted(states.frozen))}) have moments of zero; here they are trained, unless"
            " [[optimizer.groups]] gives them learning_rate_ratio = 0"
        )
    if states.trained.stage == 0 and "fp32_groups" not in states.trained.table:
        yield "ZeRO 0 does not name the optimizer's parameters: they are taken in the order of the model's weights"
    yield from _schedule_notes(states)


def _schedule_notes(states: EngineStates) -> Iterator[str]:
    """Yield the position of the learning-rate schedule where it is not that of the step."""
    scheduler = states.model.table.get("lr_scheduler")
    last = whole_number(scheduler.get("last_batch_iteration")) if isinstance(scheduler, Mapping) else None
    step, skipped = states.model.count("global_steps"), states.model.count("skipped_steps")
    if skipped:
        yield f"{skipped} of its steps were skipped; here a schedule of DeepSpeed's does not count them, any other does"
    if last is not None and last + 1 != step - skipped:
        yield f"its learning-rate schedule was after update {last + 1}; here it is after step {step}"
