"""Read the optimizer block of DeepSpeed's JSON into [optimizer]."""

from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import VERSION
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft, did_you_mean

# DeepSpeed takes "Adam" for AdamW unless adam_w_mode is false.
_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd", "lion": "lion"}
CLASSES = {
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "cpuadam": "adamw",
    "fusedlion": "lion",
    "deepspeedcpulion": "lion",
    "cpulion": "lion",
}
"""Classes of DeepSpeed that compute what a type does; people write their names, which DeepSpeed refuses as a type."""
# "Adam" and its classes take the weight decay into the gradient where one of these is false.
_DECOUPLED = ("adam_w_mode", "adamw_mode")
OTHER_OPTIMIZERS = (
    *("Lamb", "Adagrad", "Muon", "MuAdam", "MuAdamW", "MuSGD"),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam"),
)
"""Optimizers that DeepSpeed has, or finds in torch.optim, and megalite does not, or not by DeepSpeed's rule."""
_OURS_ALONE = ("adafactor", "muon")
_OTHERS = "use AdamW, SGD or Lion"
_REMOVED_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
_READ = {
    "lr": "learning_rate",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
}
"""Defaults of the optimizers that DeepSpeed builds."""
TORCH_ADAMW_DECAY = 0.01
"""The default of torch's AdamW, which `torch_adam` asks for."""
# Options of the update: key -> the only supported value.
_FIXED: dict[str, dict[str, Any]] = {
    "adamw": {
        "amsgrad": False,
        "bias_correction": True,
        "fp32_optimizer_states": True,
        "maximize": False,
    },
    "sgd": {"dampening": 0, "nesterov": False, "maximize": False},
    "lion": {"fp32_optimizer_states": True},
}
# Options of how an implementation computes: megalite has its own.
_IMPLEMENTATION = ("capturable", "differentiable", "foreach", "fused")
_FREE = {
    "adamw": (*_DECOUPLED, "set_grad_none", "torch_adam", *_IMPLEMENTATION),
    "sgd": ("differentiable", "foreach", "fused"),
    "lion": ("set_grad_none",),
}


def parameters_of(name: str) -> tuple[str, ...]:
    """Return the parameters that DeepSpeed takes for an optimizer: "adamw", "sgd" or "lion"."""
    return (*DEFAULTS[name], *_FIXED[name], *_FREE[name])


def read_optimizer(draft: SettingsDraft, block: Block, table: Any, peak: str | None) -> None:
    """Read AdamW, Adam, SGD or Lion; add a problem for another optimizer or an unsupported option.

    A parameter that the block leaves out has DeepSpeed's default, unless RUN.toml sets it.
    peak: the scheduler's parameter that replaces the learning rate; None where the scheduler keeps it.
    """
    if not isinstance(table, dict):
        return
    kind = table.get("type", AUTO)
    written = str(kind).lower()
    name = _OPTIMIZERS.get(written) or CLASSES.get(written)
    if written in CLASSES:
        key, called = block.key("optimizer.type"), {"adamw": "AdamW", "lion": "Lion"}[CLASSES[written]]
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
    given = {key: value for key, value in params.items() if key in _READ}
    if peak is not None:
        _drop_rate(draft, block, given, peak)
    for theirs, value in given.items():
        block.take(draft, f"optimizer.params.{theirs}", "optimizer", _READ[theirs], value)
    if name is not None:
        for theirs, default in DEFAULTS[name].items():
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
    if named is not None and named.lower() in _OURS_ALONE:
        remedy = f'remove the block and set optimizer.name = "{named.lower()}", without ZeRO'
        return f"megalite does not support DeepSpeed's {shown(kind)}, but has its own", remedy
    if named is not None:
        return f"megalite does not support {shown(kind)}", _OTHERS
    remedy = did_you_mean(str(kind), ("AdamW", "Adam", "SGD", "Lion")) or _OTHERS
    return f"DeepSpeed {VERSION} has no optimizer {shown(kind)}", remedy


def _check(draft: SettingsDraft, block: Block, kind: Any, name: str, params: dict[str, Any]) -> None:
    called = kind if kind != AUTO else "AdamW"
    for key, value in params.items():
        path = block.key(f"optimizer.params.{key}")
        if key == "max_grad_norm":
            draft.problem(path, "is refused by DeepSpeed", "use gradient_clipping at the top level")
        elif key not in parameters_of(name):
            remedy = did_you_mean(key, parameters_of(name)) or f"it has {', '.join(DEFAULTS[name])}"
            draft.problem(path, f"{called} has no such parameter in DeepSpeed {VERSION}", remedy)
        elif key in _FIXED[name] and value not in (AUTO, _FIXED[name][key]):
            only = shown(_FIXED[name][key])
            draft.problem(path, f"megalite does not support {shown(value)}", f"use {only}")
    coupled = [mode for mode in _DECOUPLED if params.get(mode) is False]
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


def _drop_rate(draft: SettingsDraft, block: Block, given: dict[str, Any], peak: str) -> None:
    rate = given.pop("lr", AUTO)
    if rate != AUTO and rate != draft.section("optimizer").get("learning_rate", rate):
        key = block.key("optimizer.params.lr")
        draft.notes.append(f"{key} has no effect: scheduler.params.{peak} replaces it, as in DeepSpeed")
