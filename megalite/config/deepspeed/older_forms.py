"""Bring what earlier versions of DeepSpeed and other trainers write into the form of today's DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft

_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_COMMENTS = ("comment", "comments")


def in_todays_form(draft: SettingsDraft, block: Block) -> Block:
    """Return the block without comments, with a ZeRO stage and today's offload; add a note for each change."""
    values = _without_comments(block.values)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        zero = {"stage": int(zero)}
        values["zero_optimization"] = zero
        draft.notes.append(
            f'{block.key("zero_optimization")} is an older form of {{"stage": {zero["stage"]}}}'
        )
    if isinstance(zero, Mapping):
        values["zero_optimization"] = _zero(draft, block, dict(zero))
    return Block(values, block.file)


def _zero(draft: SettingsDraft, block: Block, zero: dict[str, Any]) -> dict[str, Any]:
    for older, name in _OFFLOAD.items():
        asked = zero.get(older)
        if isinstance(asked, bool):
            del zero[older]
            if asked and name not in zero:
                zero[name] = {"device": "cpu"}
                key = block.key(f"zero_optimization.{older}")
                draft.notes.append(f'{key} is an older form of {name}: {{"device": "cpu"}}')
        elif asked not in (None, AUTO):
            draft.problem(block.key(f"zero_optimization.{older}"), f"{shown(asked)} should be true or false")
    if zero.get("stage") == AUTO:
        zero["stage"] = _default_stage(draft)
        key = block.key("zero_optimization.stage")
        draft.notes.append(f'{key} "{AUTO}" is {zero["stage"]} here; write 1, 2 or 3 to choose')
    param = zero.get("offload_param")
    device = param.get("device", "none") if isinstance(param, Mapping) else "none"
    if device not in ("none", AUTO) and zero.get("stage", 0) in (1, 2):
        del zero["offload_param"]
        draft.notes.append(
            f"{block.key('zero_optimization.offload_param')} has no effect with ZeRO {zero['stage']}, which leaves the "
            "weights whole"
        )
    return zero


def _default_stage(draft: SettingsDraft) -> int:
    """Return accelerate's default, 2, or 1 for a pipeline, which needs the gradients whole until its end."""
    return 2 if draft.section("parallel").get("pipeline", 1) == 1 else 1


def _without_comments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without the keys in which people write comments: JSON has none."""
    return {
        key: _without_comments(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if not key.startswith(("_", "#", "//")) and key.lower() not in _COMMENTS
    }
