"""Fine-tuning as axolotl and LLaMA-Factory have it: adapters, data sets, chat templates, pairs."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.convert.adopt.rules import KeyRule, Reading, Together, number, text, whole

_OUR_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_QKV = ("q_proj", "k_proj", "v_proj")
_LINEARS = {
    **{name: (name,) for name in _OUR_LINEARS},
    "query_key_value": _QKV,
    "qkv_proj": _QKV,
    "Wqkv": _QKV,
    "c_attn": _QKV,
    "dense": ("o_proj",),
    "dense_h_to_4h": ("up_proj",),
    "dense_4h_to_h": ("down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fc1": ("up_proj",),
    "fc2": ("down_proj",),
    "c_fc": ("up_proj",),
}
_EVERY = ("all", "all-linear", "all_linear")
_SUFFIXES = (".json", ".jsonl", ".parquet", ".gz", ".txt")
_LOCAL = ("./", "../", "/", "~")
DOWNLOAD = "download it as .jsonl or .parquet and name the file as data.source"
OUR_TEMPLATES = ("chatml", "alpaca")


def names(value: Any) -> list[str]:
    """Return a list of names, also of one that is a text with commas. Raises ValueError."""
    parts = value.split(",") if isinstance(value, str) else value
    if (
        not isinstance(parts, list)
        or not parts
        or not all(isinstance(part, str) and part.strip() for part in parts)
    ):
        raise ValueError(f"{value!r} is no list of names")
    return [part.strip() for part in parts]


def read_targets(reading: Reading, key: str, value: Any) -> None:
    """The adapted linears, by their names in the family's files."""
    given = names(value)
    if any(name in _EVERY for name in given):
        reading.take(key, {"adapter.targets": "all"}, "every linear of the layers")
        return
    unknown = [name for name in given if name not in _LINEARS]
    if unknown:
        remedy = f"use {', '.join(_OUR_LINEARS)}; the embedding and the head go to adapter.modules_to_save"
        reading.refuse(key, f"megalite adapts no {', '.join(unknown)}", remedy)
        return
    targets = list(dict.fromkeys(ours for name in given for ours in _LINEARS[name]))
    if targets == given:
        reading.take(key, {"adapter.targets": targets})
    else:
        reading.change(
            key,
            {"adapter.targets": targets},
            "in Llama's names; each part of a fused weight has its own update",
        )


def read_modules_to_save(reading: Reading, key: str, value: Any) -> None:
    if value == []:
        reading.no_effect(key, "it is empty")
    else:
        reading.take(key, {"adapter.modules_to_save": names(value)})


def is_file(name: str, folder: Path) -> bool:
    """Return whether a data set's name is a path: by its form, or since it exists here or beside the file."""
    return (
        name.endswith(_SUFFIXES)
        or name.startswith(_LOCAL)
        or any(each.exists() for each in (Path(name), folder / name))
    )


def source_setting(paths: Sequence[str]) -> str | list[str]:
    """Return the paths as data.source has them: a text, or a list of several."""
    distinct = list(dict.fromkeys(paths))
    return distinct[0] if len(distinct) == 1 else distinct


def read_micro_batch(reading: Reading, key: str, value: Any, *, pairs: bool) -> None:
    """The sequences of a micro batch; megalite counts the two answers of a pair."""
    size = whole(value)
    if pairs:
        reading.change(key, {"training.micro_batch_size": 2 * size}, "megalite counts both answers of a pair")
    else:
        reading.take(key, {"training.micro_batch_size": size})


def read_validation_share(reading: Reading, key: str, value: Any) -> None:
    share = number(value)
    if share == 0:
        reading.no_effect(key, "there is no validation text")
    elif 0 < share < 1:
        reading.take(key, {"data.split": [round(1 - share, 9), share, 0.0]})
    else:
        reading.refuse(key, "is a number of rows", "set data.split in shares, as in [0.98, 0.02, 0.0]")


def read_template(reading: Reading, key: str, value: Any) -> None:
    """A template's name: megalite has chatml and alpaca, for the others the tokenizer's own counts."""
    name = text(value)
    if name == "tokenizer_default":
        reading.take(key, {}, "the tokenizer's")
    elif name in OUR_TEMPLATES:
        reason = "compare the text with megalite data inspect: system prompts and spaces may differ"
        reading.change(key, {"tokenizer.chat_template": name}, reason)
    else:
        reason = "the tokenizer's own template counts; compare the text with megalite data inspect"
        reading.change(key, {}, reason)


def read_model(reading: Reading, key: str, value: Any) -> None:
    """The name of the weights, with their revision where they are no folder here."""
    name = text(value)
    revision = reading.get("model_revision", reading.get("revision_of_model"))
    plain = revision in (None, "", "main") or Path(name).exists()
    reading.take(key, {"model.weights": name if plain else f"{name}@{revision}"})


def read_tokens(reading: Reading, key: str, value: Any, *, adapter: bool) -> None:
    """Tokens that are added, which need rows of their own."""
    added = names(value)
    if adapter:
        reading.refuse(key, "megalite adds no tokens with an adapter", "leave it out, or train all weights")
    else:
        reading.change(key, {"tokenizer.add_tokens": added}, "their rows start as the mean of the others")


def of_lora(
    rules: Mapping[str, KeyRule], names: str, key: str, kinds: Collection[str], default: str = ""
) -> dict[str, KeyRule]:
    """Return the rules of the keys `names`, without effect where the value of `key` is none of `kinds`."""

    def within(rule: KeyRule) -> KeyRule:
        def read(reading: Reading, name: str, value: Any) -> None:
            if reading.get(key, default) in kinds:
                rule.answer(reading, name, value)
            else:
                reading.no_effect(name, "the run trains no LoRA")

        return Together(read)

    return {name: within(rules[name]) for name in names.split()}


def fill_adapter_defaults(reading: Reading, defaults: dict[str, Any], reason: str) -> None:
    """Set the defaults of an adapter where the run has one."""
    if reading.account.settings.get("adapter.kind") == "lora":
        for setting, value in defaults.items():
            reading.account.default(setting, value, reason)
        reading.account.note(
            "A starts from other random values than PEFT's, of the same distribution; B starts at 0"
        )
