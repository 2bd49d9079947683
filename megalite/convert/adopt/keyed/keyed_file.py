"""Common to the systems whose files are mappings (YAML, JSON): merge the files, then answer every key by a table."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config.sections.mapping_file import flat
from megalite.config.sections.unchecked import did_you_mean
from megalite.convert.adopt.account import Account
from megalite.convert.adopt.rules import KeyRule, NoEffect, Reading, Refuse, apply_rules
from megalite.convert.adopt.sources import Source
from megalite.errors import ConfigError, Problem

MAPPINGS = (".yml", ".yaml", ".json")
"""Suffixes of the files that these systems have."""


def read_files(
    system: str, sources: Sequence[Source], blocks: Collection[str], *, hyphens: bool = False
) -> tuple[Reading, Reading]:
    """Return the keys of all files without those that are null, and the null ones, with one account.

    blocks: dotted names of the tables whose keys are answered one by one. hyphens: whether "a-b" is "a_b". Raises
    ConfigError for a key that stands twice, and for a file that is no mapping.
    """
    keys: dict[str, Any] = {}
    names: dict[str, str] = {}
    nulls: dict[str, Any] = {}
    places: dict[str, Path] = {}
    for source in sources:
        for written, value in source.mapping().items():
            name = written.replace("-", "_") if hyphens else written
            if name in places:
                message = f"stands in {places[name]} and in {source.path}"
                raise ConfigError([Problem(written, message, "delete one of the two")], "megalite adopt")
            places[name] = source.path
            for path, inner in flat({name: value}, frozenset(blocks)):
                (nulls if inner is None else keys)[path] = inner
                names[path] = written + path.removeprefix(name)
    account = Account(system)
    folder = sources[0].path.parent
    return Reading(account, keys, names, folder=folder), Reading(account, nulls, names)


def answer_all(
    reading: Reading, unset: Reading, rules: Mapping[str, KeyRule], structures: Collection[str]
) -> Reading:
    """Answer every key by its rule; unknown ones are refused with the nearest known name of their table.

    structures: the keys that may be lists or tables; others that are become refused. Returns the keys without these.
    """
    for keys in (unset, reading):
        for key, value in keys.keys.items():
            is_table = any(name.startswith(f"{key}.") for name in rules)
            if value is None and (is_table or key in rules):
                keys.no_effect(key, "it is not set")
            elif value == {} and is_table:
                keys.no_effect(key, "it is empty")
            elif key not in rules:
                _refuse_unknown(keys, key, rules, is_table=is_table)
    whole = dict(reading.keys)
    for key, value in reading.keys.items():
        takes = key in structures or isinstance(rules.get(key), NoEffect | Refuse)
        if isinstance(value, list | Mapping) and key in rules and not takes:
            reading.refuse(key, "is a list or table", "write one value")
            del whole[key]
    usable = replace(reading, keys=whole)
    apply_rules(usable, rules)
    return usable


def _refuse_unknown(reading: Reading, key: str, rules: Mapping[str, KeyRule], *, is_table: bool) -> None:
    table, _, last = key.rpartition(".")
    others = [name for name in rules if name.rpartition(".")[0] == table]
    if is_table:
        reading.refuse(key, "should be a table of keys", "write the keys below it")
        return
    remedy = did_you_mean(last, others) or "remove it, or set what it means in run.toml"
    reading.refuse(key, f"is no key of {reading.account.system} that megalite knows", remedy)


def complete(reading: Reading, *steps: Callable[[Reading], None]) -> None:
    """Take the steps that fill in a system's defaults, without those that need a key whose value is refused."""
    for step in steps:
        with suppress(ValueError):
            step(reading)


def require(reading: Reading, needed: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse what a run needs and no key says. needed: key -> the settings of ours, any of which is enough."""
    for key, ours in needed.items():
        if not any(name in reading.account.settings for name in ours) and key not in reading.answered:
            remedy = f"name the file that has it too, or set {ours[0]} in run.toml"
            reading.refuse(key, "is not set, and a run needs it", remedy)


def score(source: Source, rules: Collection[str], *, hyphens: bool = False) -> int:
    """Return how many of a file's keys a system knows. Raises ConfigError for a file that is no mapping."""
    keys = (key.replace("-", "_") if hyphens else key for key in source.mapping())
    return sum(key in rules or any(name.startswith(f"{key}.") for name in rules) for key in keys)
