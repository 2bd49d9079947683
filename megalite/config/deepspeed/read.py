"""Check every key of DeepSpeed's JSON, read those that megalite has a setting for, pass the others on."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, OURS, Block, read_block
from megalite.config.deepspeed.keys import KEYS, REMOVED, VERSION
from megalite.config.deepspeed.optimizer import read_optimizer, read_scheduler
from megalite.config.draft import Draft, did_you_mean
from megalite.config.schema import DEEPSPEED_LOSS_SCALE
from megalite.config.toml import shown
from megalite.errors import Problem

_BATCH = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batches",
}


# Keys that would change the training if passed on, or have no effect: key -> (values without effect, remedy).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "autotuning.enabled": ((False,), "remove it"),
    "compile.deepcompile": ((False,), "remove it"),
    "data_efficiency.enabled": ((False,), "remove it"),
    "data_parallel_size": ((), "set parallel.data"),
    "expert_parallel.enabled": ((False,), "remove it"),
    "gradient_allreduce_op": (("mean",), 'use "mean", which the weights of the loss assume'),
    "hybrid_engine.enabled": ((False,), "remove it"),
    "pipeline": (({},), "set parallel.pipeline and parallel.schedule"),
    "sequence_parallel_size": ((1,), "remove it"),
    "tensor_parallel.autotp_size": ((0,), "set parallel.tensor"),
    "torch_autocast.enabled": ((False,), "set training.precision"),
    "weight_quantization": (({},), "remove it"),
    "zero_optimization.compute_grad_norm": ((True,), "remove it: every step reports the norm"),
    "zero_optimization.cpu_offload": ((False,), 'the name is now offload_optimizer: {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ((False,), 'the name is now offload_param: {"device": "cpu"}'),
    "zero_optimization.zenflow": ((), "remove it"),
}
# Keys without effect in megalite: key -> why.
_IDLE = {
    "activation_checkpointing": "use training.recompute",
    "checkpoint": "megalite writes its own checkpoints",
    "datastates_ckpt": "megalite writes its own checkpoints",
    "dataloader_drop_last": "megalite loads the data",
}
_OFFLOADS = ("offload_optimizer", "offload_param")


def apply_deepspeed(draft: Draft, run_folder: Path) -> None:
    """Move the settings that megalite owns from [deepspeed] to their sections; leave there what DeepSpeed is handed."""
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
    # The file that `config` names has been read, so its path is dropped.
    ours = {key: section[key] for key in OURS if key in section and key != "config"}
    draft.values["deepspeed"] = ours | {key: value for key, value in passed_on.items() if value != AUTO}
    for key in passed_on:
        draft.origins.setdefault(f"deepspeed.{key}", block.file or draft.source)


def offload_devices(zero: object) -> dict[str, Any]:
    """Return the tables of `zero_optimization` that ask for offload -> their device."""
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
            yield Problem(block.key(path), "is not supported by megalite", remedy)


def _zero_problems(block: Block) -> Iterator[Problem]:
    zero = block.values.get("zero_optimization", {})
    if isinstance(zero, bool):
        yield Problem(
            block.key("zero_optimization"), "true and false are no longer accepted", 'write {"stage": 1}'
        )
    elif isinstance(zero, dict):
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
            yield Problem(
                block.key("zero_optimization.stage"),
                f"{shown(stage)} is not a ZeRO stage",
                "use 0, 1, 2 or 3",
            )


def _read_batch(draft: Draft, block: Block, passed_on: dict[str, Any]) -> None:
    for theirs, ours in _BATCH.items():
        block.take(draft, theirs, "training", ours, passed_on.pop(theirs, None))


def _read_precision(draft: Draft, block: Block, passed_on: dict[str, Any]) -> None:
    """Read fp16.enabled and bf16.enabled into training.precision; pass the rest of the two blocks on."""
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
        draft.problem(block.key(enabled[0]), f"and {enabled[1]} are both true", "enable only one of them")


def _read_loss_scale(draft: Draft, block: Block, fp16: dict[str, Any]) -> None:
    """Move the loss scale's settings out of the fp16 block; DeepSpeed writes a dynamic scale as 0."""
    for theirs, ours in DEEPSPEED_LOSS_SCALE.items():
        value = fp16.pop(theirs, None)
        dynamic = theirs == "loss_scale" and value == 0 and not isinstance(value, bool)
        block.take(draft, f"fp16.{theirs}", "training", ours, "dynamic" if dynamic else value)
