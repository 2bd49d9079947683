"""The settings of Adam in DeepSpeed's files: in its JSON, its optimizer's parameter groups and its state dict."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.convert.deepspeed.folder import WEIGHTS_ONLY
from megalite.convert.foreign.adamw import MOMENTS, number, require_adamw, settings_of
from megalite.errors import CheckpointError

Groups = Sequence[Mapping[str, Any]]
# "cpu_adam" is GPT-NeoX's word for DeepSpeed's Adam on the CPU.
_ADAM = ("adam", "adamw", "cpu_adam")


def settings(groups: Groups, config: object, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's settings in our words; the learning rate is the one before its schedule, if it is known.

    config: the DeepSpeed JSON, or anything else where the files have none. table: the optimizer's state dict.
    """
    values = settings_of(groups)
    if (peak := number(_parameters(config).get("lr"))) is not None:
        values["learning_rate"] = peak
    in_json = config.get("gradient_clipping") if isinstance(config, Mapping) else None
    limits = [limit for limit in (number(in_json), number(table.get("clip_grad"))) if limit is not None]
    if limits:
        values["gradient_clipping"] = next(filter(None, limits), 0.0)
    return values


def precision(config: object) -> str | None:
    """Return training.precision of the DeepSpeed JSON; None where it does not say one."""
    blocks = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    sections = {name: config.get(name) for name in blocks} if isinstance(config, Mapping) else {}
    on = (
        name
        for name, block in sections.items()
        if isinstance(block, Mapping) and block.get("enabled") is True
    )
    return next((blocks[name] for name in on), None)


def require_adam(groups: Groups, config: object, states: Collection[str], place: Path) -> None:
    """Raise CheckpointError where the next update differs from AdamW's. states: state keys beside the weights.

    An optimizer that the program made itself is in no JSON: of these only the states and groups tell.
    """
    kind = _section(config).get("type")
    others = sorted({*states} - {*MOMENTS})
    name = "" if str(kind or "adam").lower() in _ADAM else str(kind)
    if name or others:
        raise CheckpointError(
            f"{place} was trained with {name or 'an optimizer with ' + ', '.join(others)}, but only the states"
            f" of Adam and AdamW are read; {WEIGHTS_ONLY}"
        )
    in_json = {"decoupled_weight_decay": _parameters(config).get("adam_w_mode")}
    require_adamw([{**in_json, **group} for group in groups], place)
    if any(group.get("bias_correction") is False for group in groups):
        raise CheckpointError(
            f"{place} was trained without bias_correction, which AdamW here always has; {WEIGHTS_ONLY}"
        )


def _section(config: object) -> Mapping[str, Any]:
    """Return `optimizer` of the DeepSpeed JSON; empty where the program made the optimizer itself."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _parameters(config: object) -> Mapping[str, Any]:
    parameters = _section(config).get("params")
    return parameters if isinstance(parameters, Mapping) else {}
