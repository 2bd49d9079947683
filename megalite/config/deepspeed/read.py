"""Check every key of DeepSpeed's JSON, read those that megalite has a setting for, pass the others on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.check import check_keys, idle_notes, passed_on
from megalite.config.deepspeed.json_file import AUTO, OURS, Block, read_block
from megalite.config.deepspeed.monitors import read_monitors
from megalite.config.deepspeed.older_forms import in_todays_form
from megalite.config.deepspeed.optimizer import read_optimizer
from megalite.config.deepspeed.scheduler import read_scheduler, sets_the_peak
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.schema import DEEPSPEED_LOSS_SCALE
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft

_BATCH = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batches",
}
_HYSTERESIS = 2
"""DeepSpeed's default of fp16.hysteresis; its other defaults of the loss scale are those of [training]."""
_GRADIENT_CLIPPING = 1.0
"""DeepSpeed's default of gradient_clipping."""


def apply_deepspeed(draft: SettingsDraft, run_folder: Path) -> None:
    """Move the settings that megalite owns from [deepspeed] to their sections; leave there what DeepSpeed is handed."""
    section = draft.values.get("deepspeed")
    if not isinstance(section, dict):
        return
    block = in_todays_form(draft, read_block(draft, section, run_folder))
    draft.problems += check_keys(block)
    draft.notes += idle_notes(block)
    handed = passed_on(block)
    _read_batch(draft, block)
    _read_precision(draft, block)
    _read_accumulation(draft, block)
    read_monitors(draft, block)
    block.take(
        draft, "gradient_clipping", "optimizer", "gradient_clipping", block.values.get("gradient_clipping")
    )
    scheduler = read_scheduler(draft, block, block.values.get("scheduler"))
    peak = sets_the_peak(block.values.get("scheduler")) if scheduler else None
    read_optimizer(draft, block, block.values.get("optimizer"), peak)
    _fill_what_is_left_out(draft, block)
    if "zero_optimization" in block.values and isinstance(block.values["zero_optimization"], Mapping):
        stage = block.values["zero_optimization"].get("stage", 0)
        handed["zero_optimization"] = {"stage": stage, **handed.get("zero_optimization", {})}
    if "communication_data_type" in handed and not handed.get("zero_optimization", {}).get("stage"):
        draft.notes.append(f"{block.key('communication_data_type')} has no effect without ZeRO")
    if scheduler:
        handed["scheduler"] = scheduler
    # The file that `config` names has been read, so its path is dropped.
    ours = {key: section[key] for key in OURS if key in section and key != "config"}
    draft.values["deepspeed"] = ours | handed
    for key in handed:
        draft.origins.setdefault(f"deepspeed.{key}", block.file or draft.source)


def _read_batch(draft: SettingsDraft, block: Block) -> None:
    for theirs, ours in _BATCH.items():
        block.take(draft, theirs, "training", ours, block.values.get(theirs))
    chosen = [ours for ours in _BATCH.values() if draft.has("training", ours)]
    alone = chosen in (["global_batch_size"], ["micro_batch_size"]) and any(
        key in block.values for key in _BATCH
    )
    if alone and "gradient_accumulation_steps" not in block.values:
        block.fill(draft, "gradient_accumulation_steps", "training", "micro_batches", 1)


def _read_precision(draft: SettingsDraft, block: Block) -> None:
    """Read fp16.enabled and bf16.enabled into training.precision, and the loss scale."""
    enabled: list[str] = []
    precision_set = draft.section("training").get("precision", AUTO)
    for name, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        table = block.values.get(name)
        if not isinstance(table, dict):
            continue
        switch = table.get("enabled", AUTO)
        if switch is not AUTO and switch != AUTO and not isinstance(switch, bool):
            draft.problem(block.key(f"{name}.enabled"), f"{shown(switch)} should be true or false")
        elif switch is True:
            enabled.append(f"{name}.enabled")
            if precision_set in (AUTO, precision):
                draft.set("training", "precision", precision, block.origin(f"{name}.enabled"))
        differs = (
            precision_set != precision if switch is True else precision_set == precision and switch is False
        )
        if differs and precision_set != AUTO:
            message = f"{shown(precision_set)} ({draft.origin('training.precision')}) differs from "
            message += f"{shown(switch)} ({block.origin(f'{name}.enabled')})"
            draft.problem("training.precision", message, f'make them agree, or write "{AUTO}" in one of them')
        if name == "fp16":
            _read_loss_scale(draft, block, table, on=switch is True)
        elif switch is False and precision_set == AUTO and not enabled:
            draft.set("training", "precision", "fp32", block.origin(f"{name}.enabled"))
    if len(enabled) > 1:
        draft.problem(block.key(enabled[0]), f"and {enabled[1]} are both true", "enable only one of them")


def _read_loss_scale(draft: SettingsDraft, block: Block, fp16: Mapping[str, Any], *, on: bool) -> None:
    """Read the loss scale's settings; DeepSpeed writes a dynamic scale as 0."""
    for theirs, ours in DEEPSPEED_LOSS_SCALE.items():
        value = fp16.get(theirs)
        dynamic = theirs == "loss_scale" and value == 0 and not isinstance(value, bool)
        block.take(draft, f"fp16.{theirs}", "training", ours, "dynamic" if dynamic else value)
    if on and "hysteresis" not in fp16:
        block.fill(draft, "fp16.hysteresis", "training", "loss_scale_hysteresis", _HYSTERESIS)


def _read_accumulation(draft: SettingsDraft, block: Block) -> None:
    """Read data_types.grad_accum_dtype, which must be fp32 or the number type of the model."""
    table, path = block.values.get("data_types"), "data_types.grad_accum_dtype"
    dtype = table.get("grad_accum_dtype", AUTO) if isinstance(table, dict) else AUTO
    if dtype == AUTO:
        return
    precision = draft.section("training").get("precision", AUTO)
    if problem := problem_of("fp32 or bf16 or fp16", dtype):
        draft.problem(block.key(path), *problem)
    elif dtype in ("fp32", precision):
        block.take(draft, path, "training", "accumulation", "fp32" if dtype == "fp32" else "model")
    else:
        source = draft.origin("training.precision")
        message = f"{shown(dtype)} differs from training.precision = {shown(precision)} ({source})"
        draft.problem(block.key(path), message, f'use "fp32", or set training.precision to {shown(dtype)}')


def _fill_what_is_left_out(draft: SettingsDraft, block: Block) -> None:
    """Beside an optimizer of the file clip as DeepSpeed does by default, and note a schedule that it would not have."""
    optimizer = block.values.get("optimizer")
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        return
    if "scheduler" not in block.values and not draft.has("optimizer", "schedule"):
        key = block.key("scheduler")
        draft.notes.append(
            f"{key} is not set: DeepSpeed keeps the learning rate, megalite uses optimizer.schedule"
        )
    if "gradient_clipping" not in block.values:
        block.fill(draft, "gradient_clipping", "optimizer", "gradient_clipping", _GRADIENT_CLIPPING)
