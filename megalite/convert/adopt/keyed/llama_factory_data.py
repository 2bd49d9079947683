"""LLaMA-Factory's data: names that dataset_info.json explains, templates, packing."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.sections.hub_dataset import HubDataset
from megalite.convert.adopt.keyed import tuning
from megalite.convert.adopt.rules import Reading, computed, switch, text
from megalite.convert.adopt.sources import read_source
from megalite.errors import ConfigError

_INFO = "dataset_info.json"
# The columns of dataset_info.json that rename nothing for megalite's forms (docs/fine-tuning.md).
_COLUMNS = {
    "prompt": ("instruction", "prompt", "question", "text"),
    "query": ("input",),
    "response": ("output", "response", "answer", "completion"),
    "messages": ("conversations", "messages"),
    "system": ("system",),
    "tools": ("tools",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
_HUBS = frozenset({"hf_hub_url", "ms_hub_url", "om_hub_url"})
_TAGS = {"role_tag": ("from", "role"), "content_tag": ("value", "content")}


def _read_dataset(reading: Reading, key: str, value: Any) -> None:
    """dataset and eval_dataset: names of dataset_info.json in dataset_dir, which must be files."""
    setting = "data.source" if key == "dataset" else "data.validation"
    folder = _data_folder(reading)
    info = _info(folder)
    if info is None:
        remedy = f"put {_INFO} into {folder}, or set {setting} in run.toml"
        reading.refuse(key, f"names data sets of {folder / _INFO}, which is not here", remedy)
        return
    problems: list[str] = []
    paths: list[str] = []
    columns: set[str] = set()
    for name in tuning.names(value):
        entry = info.get(name)
        problems += [f"{name}: {problem}" for problem in _problems(entry, reading.get("stage", "sft"))]
        if isinstance(entry, Mapping) and (source := _source(entry, folder)):
            paths.append(source)
            columns.add(str(_table(entry, "columns").get("prompt", "")))
    settings: dict[str, Any] = {setting: tuning.source_setting(paths)} if paths else {}
    if reading.get("stage") == "pt" and columns - {"", "text"} and len(columns) == 1:
        settings["data.text_column"] = min(columns)
    if problems:
        reading.refuse(
            key, "; ".join(problems), f"write them as a file of one of megalite's forms, and set {setting}"
        )
    else:
        reading.take(key, settings, f"by {folder / _INFO}")


def _data_folder(reading: Reading) -> Path:
    named = Path(text(reading.get("dataset_dir", "data")))
    beside = reading.folder / named
    return beside if (beside / _INFO).is_file() and not (named / _INFO).is_file() else named


def _info(folder: Path) -> dict[str, Any] | None:
    try:
        return read_source(folder / _INFO).mapping()
    except ConfigError:
        if (folder / _INFO).is_file():
            raise
        return None


def _table(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = entry.get(name)
    return table if isinstance(table, Mapping) else {}


def _source(entry: Mapping[str, Any], folder: Path) -> str | None:
    """Return the name on the Hub, which LLaMA-Factory reads before a file, or the file."""
    name = entry.get("file_name")
    return _hub_source(entry) or (str(folder / name) if isinstance(name, str) else None)


def _hub_source(entry: Mapping[str, Any]) -> str | None:
    if entry.get("folder") or entry.get("revision") not in (None, "main"):
        return None
    return HubDataset.source_of(entry.get("hf_hub_url"), entry.get("subset"), entry.get("split"))


def _problems(entry: Any, stage: Any) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"is not in {_INFO}"
        return
    if ("file_name" not in entry or not _HUBS.isdisjoint(entry)) and _hub_source(entry) is None:
        yield "is on another hub than Hugging Face's, or a folder or revision there; download it"
    for theirs, column in _table(entry, "columns").items():
        if column not in _COLUMNS.get(theirs, ()) and (stage, theirs) != ("pt", "prompt"):
            yield f"its column {column} ({theirs}) has another name in megalite's forms"
    for theirs, name in _table(entry, "tags").items():
        if theirs in _TAGS and name not in _TAGS[theirs]:
            yield f"its field {name} ({theirs}) has another name in megalite's forms"
    if (entry.get("subset") and _hub_source(entry) is None) or entry.get("num_samples"):
        yield "it takes a part of the file"
    if entry.get("ranking") and entry.get("formatting") == "sharegpt":
        yield "its prompt is a conversation, where megalite reads prompt, chosen and rejected"


def _read_packing(reading: Reading, key: str, value: Any) -> None:
    """packing and neat_packing: megalite always keeps packed conversations apart."""
    neat, on = reading.is_on("neat_packing"), reading.is_on("packing") or reading.is_on("neat_packing")
    if reading.get("stage", "sft") != "sft":
        kind = "text is always packed" if reading.get("stage") == "pt" else "pairs are not packed"
        reading.no_effect(key, kind)
    elif not on:
        reading.take(key, {"data.packing": "none"})
    elif neat:
        reading.take(key, {"data.packing": "greedy"}, "conversations see only themselves")
    else:
        reason = "conversations see only themselves; LLaMA-Factory lets packed ones see each other"
        reading.change(key, {"data.packing": "greedy"}, reason)


def _read_trained(reading: Reading, key: str, value: Any) -> None:
    if not switch(value):
        reading.no_effect(key, "it is off")
    elif reading.get("stage", "sft") != "sft":
        reading.no_effect(key, "the stage is not sft")
    elif key == "train_on_prompt":
        reading.take(key, {"data.train_on": "all"})
    else:
        reading.take(key, {"data.train_on": "last"})


def _read_template(reading: Reading, key: str, value: Any) -> None:
    if reading.get("stage") == "pt":
        reading.no_effect(key, "text has no template")
    else:
        tuning.read_template(reading, key, value)


RULES = computed(
    {
        _read_dataset: "dataset eval_dataset",
        _read_template: "template",
        tuning.read_validation_share: "val_size",
        _read_packing: "packing neat_packing",
        _read_trained: "train_on_prompt mask_history",
    }
)
"""The keys of the data that code answers -> their rules."""
