"""A small run as tables, changes to it by dotted keys, and what loading it says."""

import json
from collections.abc import Mapping, Sequence
from contextlib import chdir
from copy import deepcopy
from pathlib import Path
from typing import Any

from megalite.config.load import LoadedRun, load_run
from megalite.config.sections.toml import format_table
from megalite.errors import ConfigError, Problem

REMOVED = object()

RUN: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "training": {"steps": 10, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 8},
    "tokenizer": {"vocab_size": 300},
    "data": {"source": "stdlib"},
}


def changed(changes: Mapping[str, Any], base: Mapping[str, Any] = RUN) -> dict[str, Any]:
    """The run with `section.key` or `section.table.key` set, or taken out where the value is REMOVED."""
    tables = deepcopy(dict(base))
    for name, value in changes.items():
        *parents, key = name.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        if value is REMOVED:
            table.pop(key, None)
        else:
            table[key] = value
    return tables


def write_run(folder: Path, tables: Mapping[str, Any], ds_json: Mapping[str, Any] | None = None) -> Path:
    """run.toml, and beside it ds.json, which it then names."""
    if ds_json is not None:
        (folder / "ds.json").write_text(json.dumps(ds_json), encoding="utf-8")
        tables = changed({"deepspeed.config": "ds.json"}, tables)
    lines = [line for name, table in tables.items() for line in format_table(name, table)]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    ds_json: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    world_size: int | None = None,
    slots: int | None = None,
) -> LoadedRun:
    """Load the changed run as from its own folder, so that "run.toml" is its name in messages and origins."""
    path = write_run(folder, changed(changes or {}), ds_json)
    with chdir(folder):
        return load_run(path.name, flags, world_size, slots=slots)


def problems(folder: Path, changes: Mapping[str, Any] | None = None, **arguments: Any) -> list[Problem]:
    """Return the problems that loading reports; empty if there are none."""
    try:
        load(folder, changes, **arguments)
    except ConfigError as error:
        return list(error.problems)
    return []
