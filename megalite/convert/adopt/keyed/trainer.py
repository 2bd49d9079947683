"""Hugging Face's TrainingArguments, as JSON; LLaMA-Factory's files have the same keys beside their own.

Keys and defaults are those of transformers 5, with the names that version 4 had.
"""

from collections.abc import Mapping
from typing import Any

from megalite.convert.adopt.continued import answer_output, answer_resume
from megalite.convert.adopt.keyed import trainer_rates
from megalite.convert.adopt.keyed.keyed_system import KeyedSystem
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import OFF, KeyRule, Reading, computed, switch, text

_LATEST = (True, "true", "auto", "latest")


def _read_precision(reading: Reading, key: str, value: Any) -> None:
    """bf16, fp16: the weights are kept in fp32 there and here."""
    on = value == "full" or value == "auto" or switch(value)
    if not on:
        reading.no_effect(key, "it is off")
    elif value == "auto":
        reading.take(key, {"training.precision": "auto"})
    else:
        reading.take(key, {"training.precision": key}, "with fp32 master weights")


def _read_tf32(reading: Reading, key: str, value: Any) -> None:
    if reading.get("bf16", False) not in OFF or reading.get("fp16", False) not in OFF:
        reading.no_effect(key, "products of bf16 and fp16 do not have it")
    else:
        reading.take(key, {"training.tf32": switch(value)})


_SHARDING = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3}


def _read_fsdp(reading: Reading, key: str, value: Any) -> None:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    words = ["full_shard"] if words is True else words if isinstance(words, list) else []
    stage = max((_SHARDING.get(str(word), 0) for word in words), default=0)
    if not stage:
        reading.no_effect(key, "nothing is sharded")
        return
    settings: dict[str, Any] = {"deepspeed.zero_optimization.stage": stage}
    if "offload" in words:
        settings["deepspeed.zero_optimization.offload_optimizer.device"] = "cpu"
    reading.change(key, settings, "ZeRO shards what FSDP shards; the numbers are the same")


def _read_fsdp_table(reading: Reading, key: str, value: Any) -> None:
    """fsdp_config: without the word list beside it, FSDP2's sharding by itself."""
    if reading.has("fsdp") or not isinstance(value, Mapping) or not value:
        reading.no_effect(key, "fsdp decides" if value else "it is empty")
        return
    stage = 2 if value.get("reshard_after_forward") is False else 3
    settings: dict[str, Any] = {"deepspeed.zero_optimization.stage": stage}
    if value.get("offload_params") is True:
        settings["deepspeed.zero_optimization.offload_optimizer.device"] = "cpu"
    reading.change(key, settings, "ZeRO shards what FSDP shards; the numbers are the same")


def read_resume(reading: Reading, key: str, value: Any) -> None:
    output = reading.get("output_dir")
    if value in OFF or (value in _LATEST and output is None):
        reading.take(key, {}, "megalite resumes the latest checkpoint of run.folder")
    else:
        answer_resume(reading, key, text(output if value in _LATEST else value), output)


def _read_grouping(reading: Reading, key: str, value: Any) -> None:
    if value in ("random", *OFF):
        reading.take(key, {}, "sequences are drawn at random")
    elif value in (True, "group_by_length"):
        reading.change(
            key, {}, 'set data.packing = "none" and data.length_buckets for batches of similar lengths'
        )
    else:
        reading.refuse(key, "megalite draws at random, or in order with data.shuffle = false", "use random")


def _read_report_to(reading: Reading, key: str, value: Any) -> None:
    asked = value if isinstance(value, list) else [value]
    known = [name for name in asked if name in ("tensorboard", "wandb", "mlflow")]
    others = ", ".join(str(name) for name in asked if name not in known)
    if known and others:
        reading.change(key, {"monitor.report_to": known}, f"megalite does not report to {others}")
    elif known:
        reading.take(key, {"monitor.report_to": known})
    else:
        reading.no_effect(key, "megalite reports to tensorboard, wandb, mlflow and csv (monitor.report_to)")


RULES: Mapping[str, KeyRule] = {
    **read_table(__file__),
    **computed(
        {
            trainer_rates.read_length: "num_train_epochs max_steps",
            _read_precision: "bf16 fp16",
            _read_tf32: "tf32",
            trainer_rates.read_schedule_arguments: "lr_scheduler_kwargs",
            trainer_rates.read_warmup: "warmup_steps warmup_ratio",
            trainer_rates.read_optimizer: "optim",
            trainer_rates.read_betas: "adam_beta1 adam_beta2",
            trainer_rates.read_epsilon: "adam_epsilon",
            answer_output: "output_dir",
            trainer_rates.read_interval: "logging_steps eval_steps save_steps",
            trainer_rates.read_strategy: "eval_strategy evaluation_strategy save_strategy",
            read_resume: "resume_from_checkpoint",
            _read_fsdp: "fsdp",
            _read_fsdp_table: "fsdp_config",
            _read_grouping: "group_by_length train_sampling_strategy",
            _read_report_to: "report_to",
        }
    ),
}
"""Key of TrainingArguments -> its rule."""
STRUCTURES = frozenset({"lr_scheduler_kwargs", "fsdp", "fsdp_config", "deepspeed", "report_to"})
"""The keys that may be lists or tables."""


def _fill(reading: Reading) -> None:
    trainer_rates.fill_defaults(reading, {"training.micro_batch_size": 8})
    for key, ours in (("model", "model.weights"), ("train_dataset", "data.source")):
        remedy = f"set {ours} in run.toml"
        reading.refuse(key, "is an argument of Trainer in Python, not of this file", remedy)
    reading.refuse(
        "max_length", "is set where the data are tokenized", "set training.sequence_length in run.toml"
    )


SYSTEM = KeyedSystem("Hugging Face Trainer", RULES, STRUCTURES, _fill)
