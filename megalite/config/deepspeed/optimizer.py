"""Read the optimizer and scheduler blocks of DeepSpeed's JSON into [optimizer]."""

from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.draft import Draft, did_you_mean
from megalite.config.toml import shown

# DeepSpeed takes "Adam" for AdamW unless adam_w_mode is false.
_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
_OPTIMIZER_PARAMS = {
    "lr": "learning_rate",
    "betas": "betas",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
# Options of the update: key -> the only supported value.
_FIXED_PARAMS = {"amsgrad": False, "bias_correction": True, "dampening": 0, "nesterov": False}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_optimizer(draft: Draft, block: Block, table: Any) -> None:
    """Read AdamW, Adam or SGD with its parameters; add a problem for another optimizer or an unsupported option."""
    if not isinstance(table, dict):
        return
    kind = table.get("type", AUTO)
    name = _OPTIMIZERS.get(str(kind).lower())
    if kind != AUTO and name is None:
        remedy = did_you_mean(str(kind), ("AdamW", "Adam", "SGD")) or "use AdamW or SGD"
        draft.problem(block.key("optimizer.type"), f"{shown(kind)} is not supported by megalite", remedy)
    block.take(draft, "optimizer.type", "optimizer", "name", name)
    params = table.get("params")
    if not isinstance(params, dict):
        return
    for theirs, ours in _OPTIMIZER_PARAMS.items():
        block.take(draft, f"optimizer.params.{theirs}", "optimizer", ours, params.get(theirs))
    for theirs, only in _FIXED_PARAMS.items():
        if params.get(theirs, AUTO) not in (AUTO, only):
            draft.problem(
                block.key(f"optimizer.params.{theirs}"),
                f"{shown(params[theirs])} is not supported",
                f"use {shown(only)}",
            )
    if "max_grad_norm" in params:
        key = block.key("optimizer.params.max_grad_norm")
        draft.problem(key, "is refused by DeepSpeed", "use gradient_clipping at the top level")
    coupled = params.get("adam_w_mode") is False and str(kind).lower() == "adam"
    if coupled and params.get("weight_decay") != 0:
        key = block.key("optimizer.params.adam_w_mode")
        draft.problem(
            key, "Adam with weight decay in the gradient is not supported", "use AdamW, or weight_decay 0"
        )


def read_scheduler(draft: Draft, block: Block, table: Any) -> None:
    """WarmupLR, WarmupDecayLR and WarmupCosineLR with their parameters, the warm-up linear and from zero."""
    if not isinstance(table, dict):
        return
    kind = table.get("type", AUTO)
    schedule = _SCHEDULES.get(kind) if isinstance(kind, str) else None
    if kind != AUTO and schedule is None:
        remedy = did_you_mean(str(kind), _SCHEDULES) or f"use one of {', '.join(_SCHEDULES)}"
        draft.problem(block.key("scheduler.type"), f"{shown(kind)} is not supported by megalite", remedy)
        return
    block.take(draft, "scheduler.type", "optimizer", "schedule", schedule)
    params = table.get("params")
    params = params if isinstance(params, dict) else {}
    read = {
        "warmup_num_steps": "warmup_steps",
        "warmup_max_lr": "learning_rate",
        "total_num_steps": "decay_steps",
    }
    if schedule == "cosine":
        read["cos_min_ratio"] = "minimum_ratio"
    if schedule == "constant":
        del read["total_num_steps"]
    for theirs, ours in read.items():
        block.take(draft, f"scheduler.params.{theirs}", "optimizer", ours, params.get(theirs))
    if schedule == "linear":
        block.take(draft, "scheduler.type", "optimizer", "minimum_ratio", 0.0)
    for theirs in ("warmup_min_lr", "warmup_min_ratio"):
        if params.get(theirs, AUTO) not in (AUTO, 0):
            draft.problem(
                block.key(f"scheduler.params.{theirs}"), f"{shown(params[theirs])} is not supported", "use 0"
            )
    warmup_type = params.get("warmup_type")
    if warmup_type not in (None, AUTO, "linear"):
        draft.problem(
            block.key("scheduler.params.warmup_type"),
            f"{shown(warmup_type)} is not supported",
            'use "linear"',
        )
    elif warmup_type is None and schedule is not None:
        key = block.key("scheduler.params.warmup_type")
        draft.notes.append(
            f"{key} is not set: megalite's warm-up is linear, DeepSpeed's default is logarithmic"
        )
