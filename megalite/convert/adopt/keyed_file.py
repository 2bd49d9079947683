"""Common to the systems whose files are mappings (YAML, JSON): merge the files, then answer every key by a table."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.sections.unchecked import did_you_mean
from megalite.convert.adopt.account import Account
from megalite.convert.adopt.rules import KeyRule, NoEffect, Reading, Refuse, apply_rules
from megalite.convert.adopt.sources import Source
from megalite.convert.adopt.yaml_file import flat, read_mapping
from megalite.errors import ConfigError, Problem

MAPPINGS = (".yml", ".yaml", ".json")
"""Suffixes of the files that these systems have."""


def idle(reason: str, keys: str) -> dict[str, KeyRule]:
    """Return the rules of keys without effect. keys: their names, separated by spaces."""
    return dict.fromkeys(keys.split(), NoEffect(reason))


def refused(
    reason: str, remedy: str, keys: str, harmless: Collection[Any] = (False, 0, "none", [], {})
) -> dict[str, KeyRule]:
    """Return the rules of keys that change the numbers unless they have a harmless value (null always is one)."""
    return dict.fromkeys(keys.split(), Refuse(reason, remedy, harmless))


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
        for written, value in read_mapping(source).items():
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


def answer_all(reading: Reading, unset: Reading, rules: Mapping[str, KeyRule]) -> None:
    """Answer every key by its rule; unknown ones are refused with the nearest known name of their table."""
    for keys in (unset, reading):
        for key in keys.keys:
            if key not in rules and key not in keys.answered:
                table, _, last = key.rpartition(".")
                others = [name for name in rules if name.rpartition(".")[0] == table]
                remedy = did_you_mean(last, others) or "remove it, or set what it means in run.toml"
                keys.refuse(key, f"is no key of {reading.account.system} that megalite knows", remedy)
    for key in unset.keys:
        unset.no_effect(key, "it is not set")
    apply_rules(reading, rules)


def score(source: Source, rules: Mapping[str, KeyRule], *, hyphens: bool = False) -> int:
    """Return how many of a file's keys a system knows. Raises ConfigError for a file that is no mapping."""
    keys = (key.replace("-", "_") if hyphens else key for key in read_mapping(source))
    return sum(key in rules or any(name.startswith(f"{key}.") for name in rules) for key in keys)
