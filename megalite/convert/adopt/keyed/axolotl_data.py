"""axolotl's data: the list of data sets, their types, prompts and packing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megalite.config.sections.hub_dataset import HubDataset
from megalite.convert.adopt.keyed import tuning
from megalite.convert.adopt.rules import OFF, Reading, switch, text

# type -> the rows that megalite reads likewise; others build their prompts from other columns.
_CHAT_TYPES = ("chat_template", "sharegpt", "alpaca", "alpaca_chat", "chat_template.default")
_TEXT_TYPES = ("completion", "pretrain")
_PAIR_TYPES = ("chatml.intel", "llama3.intel", "chatml.ultra", "llama3.ultra", "chatml", "llama3")
# field -> the values with which megalite finds the same columns, or which change nothing.
_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "field_messages": ("messages", "conversations"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "field_system": ("system",),
    "field_tools": ("tools",),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "field_instruction": ("instruction", "question", "prompt"),
    "field_input": ("input",),
    "field_output": ("output", "answer", "response"),
    "message_field_training": ("train", "training", "loss"),
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "drop_system_message": OFF,
    "trust_remote_code": (*OFF, True),
    "split_thinking": (*OFF, True),
    "chat_template": ("tokenizer_default", "chatml", "alpaca"),
    "revision": ("main",),
    "data_files": (),
    "field": (),
    "text_column": (),
    "ds_type": ("json", "parquet", "text", "arrow"),
    "path": (),
    "type": (),
    "name": (),
    "conversation": ("chatml",),
    "message_property_mappings": (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "preprocess_shards": (1,),
}
_READ = ("path", "type", "data_files", "field", "text_column", "name", "split")
_ROLE_NAMES = {"assistant": {"assistant", "gpt", "model"}, "user": {"user", "human"}, "system": {"system"}}


def read_datasets(reading: Reading, key: str, value: Any) -> None:
    """datasets, test_datasets and pretraining_dataset: files of types with the same rows here."""
    entries = value if isinstance(value, list) else [{"path": value}] if isinstance(value, str) else None
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError("it should be a list of tables with path and type")
    setting = "data.validation" if key == "test_datasets" else "data.source"
    problems = [
        f"{entry.get('path', 'a data set')}: {problem}"
        for entry in entries
        for problem in _problems(reading, key, entry)
    ]
    kinds = {_kind(reading, key, entry.get("type")) for entry in entries} - {None}
    if len(kinds) > 1:
        problems.append("text and conversations cannot be mixed")
    if problems:
        listed = "; ".join(dict.fromkeys(problems))
        reading.refuse(key, listed, f"write one of megalite's forms, and set {setting} in run.toml")
        return
    paths = [path for entry in entries for path in _sources(reading, entry)]
    settings: dict[str, Any] = {setting: tuning.source_setting(paths), "data.kind": min(map(str, kinds))}
    columns = {str(entry.get("field") or entry.get("text_column") or "text") for entry in entries}
    if settings["data.kind"] == "text" and len(columns) == 1 and columns != {"text"}:
        settings["data.text_column"] = min(columns)
    types = {str(entry.get("type")) for entry in entries}
    if any(kind.startswith("alpaca") for kind in types):
        settings["tokenizer.chat_template"] = "alpaca"
        reading.change(
            key, settings, "axolotl's Alpaca prompt begins with a sentence that megalite's leaves out"
        )
    else:
        reading.take(key, settings)


def kind_of(reading: Reading) -> str:
    """Return data.kind of the run, by its loss and the types of its data sets."""
    if reading.get("rl") in ("dpo", "ipo"):
        return "preference"
    entries = reading.get("datasets", [])
    types = (
        [entry.get("type") for entry in entries if isinstance(entry, Mapping)]
        if isinstance(entries, list)
        else []
    )
    is_text = reading.has("pretraining_dataset") or any(kind in _TEXT_TYPES for kind in types)
    return "text" if is_text else "instruct"


def _kind(reading: Reading, key: str, kind: Any) -> str | None:
    """Return data.kind of a data set's type; None for a type that is not read."""
    if reading.get("rl") in ("dpo", "ipo"):
        return "preference" if kind in _PAIR_TYPES else None
    if key == "pretraining_dataset" or kind in _TEXT_TYPES:
        return "text"
    return "instruct" if isinstance(kind, str) and kind in _CHAT_TYPES else None


def _problems(reading: Reading, key: str, entry: Mapping[str, Any]) -> Iterator[str]:
    kind = entry.get("type")
    if _kind(reading, key, kind) is None:
        name = kind if isinstance(kind, str) else "of its own prompts" if kind else "that is not set"
        yield f"megalite has no rows of the type {name}"
    if any(tuning.is_file(path, reading.folder) for path in _paths(entry)):
        if entry.get("split") not in (None, "train"):
            yield f"split is {entry['split']}"
    elif _hub_source(entry) is None:
        yield f"is on the Hub: {tuning.DOWNLOAD}"
    for name, inner in entry.items():
        if name in _READ or inner is None:
            continue
        if name == "roles":
            if not _are_usual_roles(inner):
                yield "its roles have other names"
        elif name not in _FIELDS:
            yield f"megalite has no {name}"
        elif inner not in _FIELDS[name]:
            yield f"{name} is {inner}"


def _are_usual_roles(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(names, list) and _ROLE_NAMES.get(role, set()) >= set(map(str, names))
        for role, names in value.items()
    )


def _sources(reading: Reading, entry: Mapping[str, Any]) -> Sequence[str]:
    """Return the files of a data set, or its name on the Hub."""
    paths, of_hub = _paths(entry), _hub_source(entry)
    return [of_hub] if of_hub and not any(tuning.is_file(path, reading.folder) for path in paths) else paths


def _hub_source(entry: Mapping[str, Any]) -> str | None:
    if entry.get("data_files"):
        return None
    return HubDataset.source_of(entry.get("path"), entry.get("name"), entry.get("split"))


def _paths(entry: Mapping[str, Any]) -> Sequence[str]:
    files = entry.get("data_files")
    if isinstance(files, str):
        return [files]
    if isinstance(files, list) and files:
        return [text(path) for path in files]
    return [text(entry.get("path") or "no path")]


def read_packing(reading: Reading, key: str, value: Any) -> None:
    """sample_packing: packed samples see only themselves, as here."""
    if kind_of(reading) != "instruct":
        reading.no_effect(key, "pairs are not packed, and text always is")
    elif switch(value):
        reading.take(key, {"data.packing": "best_fit"}, "samples see only themselves")
    else:
        reading.take(key, {"data.packing": "none"})


def read_too_long(reading: Reading, key: str, value: Any) -> None:
    words = {"drop": "drop", "truncate": "truncate", "raise": "stop"}
    if kind_of(reading) == "text":
        reading.no_effect(key, "text is cut into sequences")
    elif value in words:
        reading.take(key, {"data.too_long": words[value]})
    else:
        reading.refuse(key, "is no such choice", "use drop, truncate or raise")


def read_trained(reading: Reading, key: str, value: Any) -> None:
    if kind_of(reading) != "instruct":
        reading.no_effect(key, "it is for conversations")
    else:
        reading.take(key, {"data.train_on": "all" if switch(value) else "answers"})


def read_special_tokens(reading: Reading, key: str, value: Any) -> None:
    """special_tokens: the end of a text has a setting; padding and the others are not trained."""
    if key.endswith("eos_token"):
        reading.take(key, {"tokenizer.end_of_document": text(value)})
    elif key.endswith("additional_special_tokens"):
        read_tokens(reading, key, value)
    else:
        reading.no_effect(key, "the tokenizer's own files have it; padding is never part of the loss")


def read_tokens(reading: Reading, key: str, value: Any) -> None:
    tuning.read_tokens(reading, key, value, adapter=bool(reading.get("adapter")))
