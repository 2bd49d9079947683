"""Read the optimizer block of DeepSpeed's JSON into [optimizer]."""

from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import VERSION
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft, did_you_mean
from megalite.topology.optimizers import DECOUPLED, OPTIMIZERS

_FORMS = {record.name: record.deepspeed for record in OPTIMIZERS.values() if record.deepspeed is not None}
_OF_TYPE = {kind.lower(): name for name, form in _FORMS.items() for kind in form.types}
_OF_CLASS = {kind.lower(): name for name, form in _FORMS.items() for kind in form.classes}
OTHER_OPTIMIZERS = (
    *("Lamb", "Adagrad", "Muon", "MuAdam", "MuAdamW", "MuSGD"),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam"),
)
"""Optimizers that DeepSpeed has, or finds in torch.optim, and megalite does not, or not by DeepSpeed's rule."""
_OTHERS = "use " + " or ".join(", ".join(form.types[0] for form in _FORMS.values()).rsplit(", ", 1))
_REMOVED_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
_READ = {
    "lr": "learning_rate",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
TORCH_ADAMW_DECAY = 0.01
"""The default of torch's AdamW, which `torch_adam` asks for."""


def read_optimizer(draft: SettingsDraft, block: Block, table: Any, peak: str | None) -> None:
    """Read an optimizer; add a problem for one without a form in DeepSpeed's JSON or an unsupported option.

    A parameter that the block leaves out has DeepSpeed's default, unless RUN.toml sets it.
    peak: the scheduler's parameter that replaces the learning rate; None where the scheduler keeps it.
    """
    if not isinstance(table, dict):
        return
    kind = table.get("type", AUTO)
    written = str(kind).lower()
    name = _OF_TYPE.get(written) or _OF_CLASS.get(written)
    if written in _OF_CLASS:
        key, called = block.key("optimizer.type"), _FORMS[_OF_CLASS[written]].types[0]
        draft.notes.append(
            f"{key} {shown(kind)} is taken as {called}, whose update this class of DeepSpeed computes"
        )
    if kind != AUTO and name is None:
        draft.problem(block.key("optimizer.type"), *_unsupported(kind))
        return
    block.take(draft, "optimizer.type", "optimizer", "name", name)
    params = table.get("params", {})
    if not isinstance(params, dict):
        return
    _check(draft, block, kind, name or "adamw", params)
    read = {key: value for key, value in params.items() if key in _READ}
    if peak is not None:
        _drop_rate(draft, block, read, peak)
    for theirs, value in read.items():
        block.take(draft, f"optimizer.params.{theirs}", "optimizer", _READ[theirs], value)
    if name is not None:
        for theirs, default in _FORMS[name].defaults.items():
            left_out = theirs not in params and (theirs, peak is None) != ("lr", False)
            value = (
                TORCH_ADAMW_DECAY if theirs == "weight_decay" and _is_torch_adamw(kind, params) else default
            )
            if left_out:
                block.fill(draft, f"optimizer.params.{theirs}", "optimizer", _READ[theirs], value)


def _unsupported(kind: Any) -> tuple[str, str]:
    named = {each.lower(): each for each in (*OTHER_OPTIMIZERS, *_REMOVED_OPTIMIZERS)}.get(str(kind).lower())
    if named in _REMOVED_OPTIMIZERS:
        return f"{shown(kind)} was removed from DeepSpeed {VERSION}", _OTHERS
    if named is not None and named.lower() in OPTIMIZERS:
        remedy = f'remove the block and set optimizer.name = "{named.lower()}", without ZeRO'
        return f"megalite does not support DeepSpeed's {shown(kind)}, but has its own", remedy
    if named is not None:
        return f"megalite does not support {shown(kind)}", _OTHERS
    remedy = did_you_mean(str(kind), [each for form in _FORMS.values() for each in form.types]) or _OTHERS
    return f"DeepSpeed {VERSION} has no optimizer {shown(kind)}", remedy


def _check(draft: SettingsDraft, block: Block, kind: Any, name: str, params: dict[str, Any]) -> None:
    called, form = kind if kind != AUTO else "AdamW", _FORMS[name]
    for key, value in params.items():
        path = block.key(f"optimizer.params.{key}")
        if key == "max_grad_norm":
            draft.problem(path, "is refused by DeepSpeed", "use gradient_clipping at the top level")
        elif key not in form.parameters:
            remedy = did_you_mean(key, form.parameters) or f"it has {', '.join(form.defaults)}"
            draft.problem(path, f"{called} has no such parameter in DeepSpeed {VERSION}", remedy)
        elif key in form.fixed and value not in (AUTO, form.fixed[key]):
            only = shown(form.fixed[key])
            draft.problem(path, f"megalite does not support {shown(value)}", f"use {only}")
    coupled = [mode for mode in DECOUPLED if params.get(mode) is False]
    if (
        name == "adamw"
        and coupled
        and str(kind).lower() not in ("adamw", AUTO)
        and params.get("weight_decay", 0) != 0
    ):
        message = "megalite does not support false, Adam with weight decay in the gradient"
        draft.problem(block.key(f"optimizer.params.{coupled[0]}"), message, "use AdamW, or weight_decay 0")


def _is_torch_adamw(kind: Any, params: dict[str, Any]) -> bool:
    decoupled = str(kind).lower() == "adamw" or params.get("adam_w_mode") is not False
    return params.get("torch_adam") is True and decoupled


def _drop_rate(draft: SettingsDraft, block: Block, read: dict[str, Any], peak: str) -> None:
    rate = read.pop("lr", AUTO)
    if rate != AUTO and rate != draft.section("optimizer").get("learning_rate", rate):
        key = block.key("optimizer.params.lr")
        draft.notes.append(f"{key} has no effect: scheduler.params.{peak} replaces it, as in DeepSpeed")
