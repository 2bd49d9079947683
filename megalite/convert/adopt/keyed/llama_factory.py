"""LLaMA-Factory: YAML files with its own keys beside those of TrainingArguments.

Keys and defaults are those of src/llamafactory/hparams of hiyouga/LLaMA-Factory.
"""

from collections.abc import Mapping
from typing import Any

from megalite.convert.adopt.keyed import llama_factory_data, trainer, trainer_rates, tuning
from megalite.convert.adopt.keyed.keyed_file import require
from megalite.convert.adopt.keyed.keyed_system import KeyedSystem
from megalite.convert.adopt.rule_table import read_table
from megalite.convert.adopt.rules import KeyRule, Reading, computed, number

_LISTS = frozenset(
    {"lora_target", "additional_target", "dataset", "eval_dataset", "interleave_probs"}
    | {"add_tokens", "add_special_tokens", "adapter_name_or_path"}
)


def _read_batch(reading: Reading, key: str, value: Any) -> None:
    tuning.read_micro_batch(reading, key, value, pairs=reading.get("stage") == "dpo")


def _read_loss(reading: Reading, key: str, value: Any) -> None:
    if reading.get("stage") != "dpo":
        reading.no_effect(key, "the stage is not dpo")
    elif key == "pref_loss" and value in ("sigmoid", "ipo"):
        reading.take(key, {"preference.loss": value})
    elif key == "pref_loss":
        reading.refuse(key, "megalite has DPO's sigmoid and ipo", "use one of them")
    else:
        name = "beta" if key == "pref_beta" else "label_smoothing"
        reading.take(key, {f"preference.{name}": number(value)})


def _read_adapter(reading: Reading, key: str, value: Any) -> None:
    paths = tuning.names(value)
    if len(paths) > 1:
        reading.refuse(
            key, "megalite goes on from one adapter", "merge the others first (megalite convert export)"
        )
    else:
        reading.take(key, {"adapter.path": paths[0]})


def _read_tokens(reading: Reading, key: str, value: Any) -> None:
    tuning.read_tokens(reading, key, value, adapter=reading.get("finetuning_type", "lora") == "lora")


_TABLE: Mapping[str, KeyRule] = {
    **trainer.RULES,
    **read_table(__file__),
    **llama_factory_data.RULES,
    **computed(
        {
            tuning.read_model: "model_name_or_path",
            tuning.read_targets: "lora_target",
            tuning.read_modules_to_save: "additional_target",
            _read_adapter: "adapter_name_or_path",
            _read_batch: "per_device_train_batch_size",
            _read_loss: "pref_beta pref_loss dpo_label_smoothing",
            _read_tokens: "add_tokens add_special_tokens",
            trainer_rates.read_patience: "early_stopping_steps",
        }
    ),
}
_LORA = """
    lora_rank lora_alpha lora_dropout lora_target additional_target use_rslora use_dora adapter_name_or_path"""
RULES = {**_TABLE, **tuning.of_lora(_TABLE, _LORA, "finetuning_type", ("lora",), "lora")}
"""Key of LLaMA-Factory or TrainingArguments -> its rule."""


def _fill(reading: Reading) -> None:
    reason = "LLaMA-Factory's default"
    account = reading.account
    for setting, value in (
        ("data.kind", "instruct"),
        ("adapter.kind", "lora"),
        ("training.sequence_length", 2048),
    ):
        account.default(setting, value, reason)
    kind = account.settings["data.kind"]
    if kind == "instruct":
        account.default("data.packing", "none", reason)
    if kind == "preference":
        account.default("preference.beta", 0.1, reason)
    rank = account.settings.get("adapter.rank", 8)
    defaults = {
        "adapter.rank": 8,
        "adapter.alpha": 2.0 * rank,
        "adapter.dropout": 0.0,
        "adapter.targets": "all",
    }
    tuning.fill_adapter_defaults(reading, defaults, reason)
    size = 16 if kind == "preference" else 8
    others = {"training.micro_batch_size": size, "training.recompute": "full"}
    trainer_rates.fill_defaults(reading, others)
    require(reading, {"model_name_or_path": ("model.weights",), "dataset": ("data.source",)})


SYSTEM = KeyedSystem("LLaMA-Factory", RULES, trainer.STRUCTURES | _LISTS, _fill)
