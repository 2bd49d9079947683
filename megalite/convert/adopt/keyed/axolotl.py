"""axolotl: YAML files. Keys and defaults are those of src/axolotl/utils/schemas of axolotl-ai-cloud/axolotl."""

from collections.abc import Mapping
from typing import Any

from megalite.convert.adopt.keyed import axolotl_data, trainer, trainer_rates, tuning
from megalite.convert.adopt.keyed.keyed_file import require
from megalite.convert.adopt.keyed.keyed_system import KeyedSystem
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import OFF, KeyRule, Reading, computed, number, switch, whole
from megalite.convert.adopt.sink_keys import sink_keys

_LISTS = frozenset(
    {"datasets", "test_datasets", "pretraining_dataset", "plugins", "tokens"}
    | {"lora_target_modules", "lora_modules_to_save", "special_tokens.additional_special_tokens"}
)
_MODEL = "train another model, or keep axolotl for this one"
_HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "lm_eval")


def _read_adapter(reading: Reading, key: str, value: Any) -> None:
    if value == "lora":
        reading.take(key, {"adapter.kind": "lora"})
    elif value == "qlora":
        reading.change(key, {"adapter.kind": "lora"}, "the base has 16 bits")
    elif value in ("", *OFF):
        reading.take(key, {"adapter.kind": "none"})
    else:
        reading.refuse(key, "megalite has lora, and prefix tuning of its own", "use lora, or leave it out")


def _read_linear_targets(reading: Reading, key: str, value: Any) -> None:
    if switch(value):
        tuning.read_targets(reading, key, "all")
    else:
        reading.no_effect(key, "it is off")


def _read_named_targets(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("lora_target_linear") or value == []:
        reading.no_effect(key, "lora_target_linear adapts every linear" if value else "it is empty")
    else:
        tuning.read_targets(reading, key, value)


def _read_batch(reading: Reading, key: str, value: Any) -> None:
    tuning.read_micro_batch(reading, key, value, pairs=reading.get("rl") in ("dpo", "ipo"))


def _read_precision(reading: Reading, key: str, value: Any) -> None:
    """bf16, fp16 and their long names; bf16: auto is bf16 where the card has it."""
    precision = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "fp32"}[
        key
    ]
    if value == "auto":
        if not (reading.is_on("fp16") or reading.is_on("float16")):
            reading.take(key, {"training.precision": precision})
        else:
            reading.no_effect(key, "fp16 decides")
    elif value == "full" or switch(value):
        reading.take(key, {"training.precision": precision}, "with fp32 master weights")
    else:
        reading.no_effect(key, "it is off")


def _read_tf32(reading: Reading, key: str, value: Any) -> None:
    if not reading.is_on("float32") or value == "auto":
        reading.no_effect(key, "products of bf16 and fp16 do not have it")
    else:
        reading.take(key, {"training.tf32": switch(value)})


def _read_checkpointing(reading: Reading, key: str, value: Any) -> None:
    words = ("offload", "unsloth", "offload_disk")
    reading.take(key, {"training.recompute": "full" if value in words or switch(value) else "none"})


def _read_of_preference(reading: Reading, key: str, value: Any) -> None:
    name = "label_smoothing" if "smoothing" in key else "beta"
    if reading.get("rl") in ("dpo", "ipo"):
        reading.take(key, {f"preference.{name}": number(value)})
    else:
        reading.no_effect(key, "the run trains no preferences")


def _read_template(reading: Reading, key: str, value: Any) -> None:
    if axolotl_data.kind_of(reading) == "text":
        reading.no_effect(key, "text has no template")
    elif value == "jinja" or key == "chat_template_jinja":
        reading.refuse(
            key, "megalite reads templates from files", "save it and set tokenizer.chat_template to the file"
        )
    else:
        tuning.read_template(reading, key, value)


def _read_plugins(reading: Reading, key: str, value: Any) -> None:
    others = [
        name
        for name in (tuning.names(value) if value else ())
        if not any(part in name for part in _HARMLESS_PLUGINS)
    ]
    if others:
        reading.refuse(key, f"megalite has no {', '.join(others)}", _MODEL)
    else:
        reading.no_effect(key, "they change speed and memory")


def _read_per_epoch(reading: Reading, key: str, value: Any) -> None:
    ours = "validation.every" if key.startswith("eval") else "checkpoint.every"
    count = whole(value)
    if count == 0:
        reading.take(key, {}, "only after the last step")
    elif count < 0:
        raise ValueError(f"{value!r} is below 0")
    elif key.startswith("eval") and not trainer_rates.has_validation(reading):
        reading.no_effect(key, "there is no validation text: set data.validation, then validation.every")
    else:
        reading.take(key, {ours: "1 epoch" if count == 1 else f"1/{count} epochs"})


def _read_least_rate(reading: Reading, key: str, value: Any) -> None:
    if (trainer_rates.schedule_of(reading) or "cosine") != "cosine":
        reading.no_effect(key, "the schedule is not cosine")
    else:
        reading.take(key, {"optimizer.minimum_ratio": number(value)})


def _read_auto_resume(reading: Reading, key: str, value: Any) -> None:
    if reading.has("resume_from_checkpoint"):
        reading.no_effect(key, "resume_from_checkpoint takes precedence")
    else:
        trainer.read_resume(reading, key, value)


_TABLE: Mapping[str, KeyRule] = {
    **trainer.RULES,
    **read_table(__file__),
    **sink_keys(
        {
            "use_tensorboard": "tensorboard",
            "use_wandb": "wandb",
            "wandb_project": "wandb",
            "use_mlflow": "mlflow",
        },
        {
            "wandb_project": "monitor.project",
            "wandb_entity": "monitor.entity",
            "wandb_name": "monitor.run_name",
            "mlflow_experiment_name": "monitor.project",
            "mlflow_run_name": "monitor.run_name",
        },
    ),
    **computed(
        {
            tuning.read_model: "base_model",
            _read_adapter: "adapter",
            _read_named_targets: "lora_target_modules",
            _read_linear_targets: "lora_target_linear",
            tuning.read_modules_to_save: "lora_modules_to_save",
            _read_template: "chat_template chat_template_jinja",
            _read_of_preference: "rl_beta dpo_beta dpo_label_smoothing",
            axolotl_data.read_datasets: "datasets test_datasets pretraining_dataset",
            tuning.read_validation_share: "val_set_size",
            axolotl_data.read_packing: "sample_packing",
            axolotl_data.read_too_long: "excess_length_strategy",
            axolotl_data.read_trained: "train_on_inputs",
            axolotl_data.read_tokens: "tokens",
            axolotl_data.read_special_tokens: """
                special_tokens.bos_token special_tokens.eos_token special_tokens.pad_token special_tokens.unk_token
                special_tokens.additional_special_tokens""",
            _read_plugins: "plugins",
            _read_batch: "micro_batch_size",
            trainer_rates.read_length: "num_epochs",
            trainer_rates.read_optimizer: "optimizer",
            _read_least_rate: "cosine_min_lr_ratio",
            _read_precision: "bf16 bfloat16 fp16 float16 float32",
            _read_tf32: "tf32",
            _read_checkpointing: "gradient_checkpointing",
            _read_per_epoch: "evals_per_epoch saves_per_epoch",
            trainer_rates.read_patience: "early_stopping_patience",
            _read_auto_resume: "auto_resume_from_checkpoints",
        }
    ),
}
_LORA = """
    lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_modules_to_save peft_use_dora
    peft_use_rslora lora_model_dir"""
RULES = {**_TABLE, **tuning.of_lora(_TABLE, _LORA, "adapter", ("lora", "qlora"))}
"""Key of axolotl or TrainingArguments -> its rule."""


def _fill(reading: Reading) -> None:
    reason, account = "axolotl's default", reading.account
    if not reading.has("adapter"):
        account.default("adapter.kind", "none", reason)
    kind = axolotl_data.kind_of(reading)
    account.default("data.kind", kind, "by the types of the data sets")
    if kind != "text":
        account.default("data.too_long", "drop", reason)
    if kind == "instruct":
        account.default("data.packing", "none", reason)
    if kind == "preference":
        account.default("preference.beta", 0.1, reason)
    if account.settings.get("adapter.kind") == "lora":
        for key in ("lora_r", "lora_alpha"):
            if not reading.has(key):
                reading.refuse(key, "is not set, and a LoRA needs it", "set adapter.rank and adapter.alpha")
        if "adapter.targets" not in account.settings and not reading.has("lora_target_modules"):
            reading.refuse(
                "lora_target_modules", "is not set, and a LoRA needs it", "set lora_target_linear: true"
            )
    tuning.fill_adapter_defaults(reading, {"adapter.dropout": 0.0}, reason)
    # bf16 is auto where it is left out; one that is false or null has set no precision.
    bf16_off = any(answer.key in ("bf16", "bfloat16") for answer in account.answers)
    others: dict[str, Any] = {
        "training.sequence_length": 512,
        "training.micro_batch_size": 2 if kind == "preference" else 1,
        "training.precision": "fp32" if bf16_off else "bf16",
        "optimizer.schedule": "cosine",
    }
    if "training.steps" not in account.settings:
        others["training.epochs"] = 1.0
    if not (reading.has("warmup_steps") or reading.has("warmup_ratio")):
        others["optimizer.warmup_ratio"] = 0.03
        more = "where that is more, set optimizer.warmup_steps = 100"
        account.note(f"warm-up: axolotl's default is 3% of the steps, and at most 100 steps; {more}")
    trainer_rates.fill_defaults(reading, others)
    needed = {"base_model": ("model.weights",), "datasets": ("data.source",)}
    if reading.has("pretraining_dataset"):
        del needed["datasets"]
    require(reading, needed)


SYSTEM = KeyedSystem("axolotl", RULES, trainer.STRUCTURES | _LISTS, _fill, ("special_tokens",))
