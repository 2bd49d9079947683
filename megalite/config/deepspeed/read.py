"""DeepSpeed's JSON: every key checked, what says the same as our sections read into them, the rest passed on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, OURS, Block, read_block
from megalite.config.deepspeed.keys import KEYS, REMOVED, VERSION
from megalite.config.deepspeed.optimizer import read_optimizer, read_scheduler
from megalite.config.draft import Draft, did_you_mean
from megalite.config.toml import shown
from megalite.errors import Problem

_BATCH = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batches",
}

_LOSS_SCALE = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_loss_scale_power",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "loss_scale_hysteresis",
    "min_loss_scale": "minimum_loss_scale",
}

# What would change the training if it were passed on, or would silently do nothing: key -> harmless values, remedy.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "autotuning.enabled": ((False,), "take it out"),
    "compile.deepcompile": ((False,), "take it out"),
    "data_efficiency.enabled": ((False,), "take it out"),
    "data_parallel_size": ((), "set parallel.data"),
    "expert_parallel.enabled": ((False,), "take it out"),
    "gradient_allreduce_op": (("mean",), 'use "mean", on which the loss is weighted'),
    "hybrid_engine.enabled": ((False,), "take it out"),
    "pipeline": (({},), "set parallel.pipeline and parallel.schedule"),
    "sequence_parallel_size": ((1,), "take it out"),
    "tensor_parallel.autotp_size": ((0,), "set parallel.tensor"),
    "torch_autocast.enabled": ((False,), "set training.precision"),
    "weight_quantization": (({},), "take it out"),
    "zero_optimization.compute_grad_norm": ((True,), "take it out: the norm is reported at every step"),
    "zero_optimization.cpu_offload": ((False,), 'the name is now offload_optimizer: {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), 'the name is now offload_param: {"device": "cpu"}'),
    "zero_optimization.zenflow": ((), "take it out"),
}
# What does no harm and no good here: key -> why.
_IDLE = {
    "activation_checkpointing": "training.recompute is what recomputes here",
    "checkpoint": "checkpoints are megalite's own",
    "datastates_ckpt": "checkpoints are megalite's own",
    "dataloader_drop_last": "the data is loaded by megalite",
}
_OFFLOADS = ("offload_optimizer", "offload_param")


def apply_deepspeed(draft: Draft, run_folder: Path) -> None:
    """Replace [deepspeed] by what is passed on to DeepSpeed, and fill our sections with what it says of them."""
    section = draft.values.get("deepspeed")
    if not isinstance(section, dict):
        return
    block = read_block(draft, section, run_folder)
    draft.problems += [*_key_problems(block, block.values, ""), *_refused(block), *_zero_problems(block)]
    draft.notes += [
        f"{block.key(key)} has no effect: {reason}" for key, reason in _IDLE.items() if key in block.values
    ]
    passed_on = dict(block.values)
    _read_batch(draft, block, passed_on)
    _read_precision(draft, block, passed_on)
    block.take(
        draft, "gradient_clipping", "optimizer", "gradient_clipping", passed_on.pop("gradient_clipping", None)
    )
    read_optimizer(draft, block, passed_on.pop("optimizer", None))
    read_scheduler(draft, block, passed_on.pop("scheduler", None))
    for always_ours in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        passed_on.pop(always_ours, None)
    # The file that `config` names has been read by now.
    ours = {key: section[key] for key in OURS if key in section and key != "config"}
    draft.values["deepspeed"] = ours | {key: value for key, value in passed_on.items() if value != AUTO}
    for key in passed_on:
        draft.origins.setdefault(f"deepspeed.{key}", block.file or draft.source)


def offload_devices(zero: object) -> dict[str, Any]:
    """Which tables of `zero_optimization` ask for offload, and where to."""
    tables = {name: zero.get(name) for name in _OFFLOADS} if isinstance(zero, Mapping) else {}
    devices = {
        name: table.get("device", "none") for name, table in tables.items() if isinstance(table, Mapping)
    }
    return {name: device for name, device in devices.items() if device != "none"}


def _key_problems(block: Block, table: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for key, value in table.items():
        full = f"{path}.{key}" if path else key
        if full in REMOVED:
            yield Problem(block.key(full), f"was removed from DeepSpeed {VERSION}", REMOVED[full])
        elif path not in KEYS or key in KEYS[path]:
            if isinstance(value, Mapping):
                yield from _key_problems(block, value, full) if full in KEYS else ()
            elif full in KEYS and not (full == "zero_optimization" and isinstance(value, bool)):
                yield Problem(
                    block.key(full), f"{shown(value)} should be an object", f"it has {', '.join(KEYS[full])}"
                )
        else:
            known = [f"{path}.{name}" if path else name for name in KEYS[path]]
            elsewhere = [name for name in _all_keys() if name.rsplit(".", 1)[-1] == key]
            remedy = f"did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(key, known)
            yield Problem(block.key(full), f"unknown to DeepSpeed {VERSION}", remedy)


def _all_keys() -> Iterator[str]:
    for path, keys in KEYS.items():
        yield from (f"{path}.{key}" if path else key for key in keys)


def _refused(block: Block) -> Iterator[Problem]:
    for path, (harmless, remedy) in _REFUSED.items():
        value: Any = block.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and value != AUTO and not any(value == each for each in harmless):
            yield Problem(block.key(path), "is not run by megalite", remedy)


def _zero_problems(block: Block) -> Iterator[Problem]:
    zero = block.values.get("zero_optimization", {})
    if isinstance(zero, bool):
        yield Problem(block.key("zero_optimization"), "true and false are an old form", 'write {"stage": 1}')
    elif isinstance(zero, dict):
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
            yield Problem(
                block.key("zero_optimization.stage"), f"{shown(stage)} is no stage", "use 0, 1, 2 or 3"
            )


def _read_batch(draft: Draft, block: Block, passed_on: dict[str, Any]) -> None:
    for theirs, ours in _BATCH.items():
        block.take(draft, theirs, "training", ours, passed_on.pop(theirs, None))


def _read_precision(draft: Draft, block: Block, passed_on: dict[str, Any]) -> None:
    """fp16.enabled and bf16.enabled against training.precision; the rest of the two blocks is passed on."""
    enabled: list[str] = []
    given = draft.section("training").get("precision", AUTO)
    for name, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        table = passed_on.pop(name, None)
        if not isinstance(table, dict):
            continue
        switch = table.get("enabled", AUTO)
        if switch is not AUTO and switch != AUTO and not isinstance(switch, bool):
            draft.problem(block.key(f"{name}.enabled"), f"{shown(switch)} should be true or false")
        elif switch is True:
            enabled.append(f"{name}.enabled")
            if given in (AUTO, precision):
                draft.set("training", "precision", precision, block.origin(f"{name}.enabled"))
        differs = given != precision if switch is True else given == precision and switch is False
        if differs and given != AUTO:
            message = f"{shown(given)} ({draft.origin('training.precision')}) differs from "
            message += f"{shown(switch)} ({block.origin(f'{name}.enabled')})"
            draft.problem("training.precision", message, f'make them agree, or write "{AUTO}" in one of them')
        rest = {key: value for key, value in table.items() if key != "enabled"}
        if name == "fp16":
            _read_loss_scale(draft, block, rest)
        elif switch is False and given == AUTO and not enabled:
            draft.set("training", "precision", "fp32", block.origin(f"{name}.enabled"))
        if rest:
            passed_on[precision] = rest
    if len(enabled) > 1:
        draft.problem(block.key(enabled[0]), f"is true beside {enabled[1]}", "enable one of them")


def _read_loss_scale(draft: Draft, block: Block, fp16: dict[str, Any]) -> None:
    """Move the loss scale's settings out of the fp16 block; 0 is DeepSpeed's word for a dynamic scale."""
    for theirs, ours in _LOSS_SCALE.items():
        value = fp16.pop(theirs, None)
        dynamic = theirs == "loss_scale" and value == 0 and not isinstance(value, bool)
        block.take(draft, f"fp16.{theirs}", "training", ours, "dynamic" if dynamic else value)
