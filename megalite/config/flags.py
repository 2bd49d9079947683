"""`--section.key value` flags: separate them from a command's own options and apply them over RUN.toml."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.foreign_flags import DEEPSPEED, with_deepspeeds_flags
from megalite.config.sections.describe import section_models, type_names
from megalite.config.sections.toml import format_value, parse_value, shown
from megalite.config.sections.unchecked import SettingsDraft, closest_name
from megalite.errors import ConfigError, Problem

_FLAG = re.compile(r"--(?P<name>\w+(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
UNSET = "unset"
"""The word that removes a value. A text of these letters is written with quotes: '"unset"'."""
_EARLIER_UNSET = "none"
COMMAND_LINE = "the command line"


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (a command's own arguments, its `--section.key value` flags), both in their given order.

    A setting that is named without its section is among the flags, where it is a problem beside the others.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = with_deepspeeds_flags(arguments)
    while rest:
        argument = rest.pop(0)
        setting = _FLAG.fullmatch(argument) or with_section(argument)
        (overrides if setting or argument == DEEPSPEED else own).append(argument)
        if setting and "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def with_section(argument: str) -> str:
    """Return the flag that is meant by a setting without its section, --steps; "" for any other argument."""
    name = argument.split("=")[0].removeprefix("--").replace("-", "_")
    homes = [section for section, model in section_models().items() if name in model.model_fields]
    return f"--{homes[0]}.{name}" if argument.startswith("--") and homes else ""


def apply_overrides(draft: SettingsDraft, overrides: Sequence[str]) -> None:
    """Apply `["--training.steps", "100", "--model.preset=tiny", ...]` to the draft; later flags win.

    Values are TOML (`[1, 2]`, `true`); text needs no quotes; `unset` leaves a setting at its default, whatever
    RUN.toml, DeepSpeed's JSON, a preset or a config.json says.
    """
    for name, text in _pairs(draft, overrides):
        section, *keys = name.split(".")
        if section not in section_models():
            if text == UNSET:
                draft.drop(section, keys[0])
                continue
            close = closest_name(section, section_models())
            moved = {f"{close}.{'.'.join(keys)}": parse_value(text), name: None} if close else {name: None}
            remedy = f"did you mean {close}?" if close else ""
            draft.problem(f"--{name}", f"there is no section {section}", remedy, moved)
            continue
        if not isinstance(draft.values.get(section, {}), dict):
            continue  # RUN.toml sets the section to a plain value, which the schema check reports
        takes = _takes(section, keys)
        if text == _EARLIER_UNSET and takes and text not in takes:
            remedy = f"write {UNSET} to remove the value" + f", or '\"{text}\"' for the text" * (
                "TEXT" in takes
            )
            draft.problem(f"--{name}", f'"{text}" is no value of this setting', remedy, {name: None})
            continue
        table = draft.section(section)
        for key in keys[:-1]:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, dict) else {}
            table = table[key]
        draft.unset.discard(f"{section}.{keys[0]}")
        if text != UNSET:
            table[keys[-1]] = _value(takes, text)
        elif takes:
            table.pop(keys[-1], None)
            draft.unset.add(f"{section}.{keys[0]}")
        elif section != "deepspeed":
            draft.drop(section, keys[0])  # an unknown key of the file
        else:  # a key of DeepSpeed, which may stand in a JSON file that is read later
            table[keys[-1]] = None
        draft.origins[f"{section}.{keys[0]}"] = f"--{name}"


def as_flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Turn keyword settings, section -> table, into `--section.key=value` flags. Raises ConfigError."""
    for section, table in settings.items():
        if not isinstance(table, Mapping) and "." not in section:
            problem = Problem(
                section, f"is {shown(table)}, but should be a section", f'write {section}={{"key": value}}'
            )
            raise ConfigError([problem], "the call")
        yield from _flags_of(section, table)


def _flags_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flags_of(f"{name}.{key}", inner)
    else:
        value = str(value) if isinstance(value, Path) else value
        try:
            yield f"--{name}={UNSET if value is None else format_value(value)}"
        except TypeError as error:
            raise ConfigError([Problem(name, str(error), "use numbers, text, lists")], "the call") from None


def _pairs(draft: SettingsDraft, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = with_deepspeeds_flags(overrides)
    rest = list(words)
    while rest:
        argument = rest.pop(0)
        flag = _FLAG.fullmatch(argument)
        if argument == DEEPSPEED:
            if "deepspeed" not in draft.values and not any(word.startswith("--deepspeed.") for word in words):
                remedy = "add --deepspeed_config ds.json, or a section [deepspeed] to RUN.toml"
                draft.problem(argument, "asks for DeepSpeed, but nothing configures it", remedy)
        elif flag is None and (meant := with_section(argument)):
            name, equals, text = argument.partition("=")
            if not equals and rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            cure = {meant.removeprefix("--"): parse_value(text), name: None} if text else {}
            draft.problem(argument, "has no section", f"did you mean {meant}?", cure)
        elif flag is None:
            draft.problem(argument, "is not a setting", "write --section.key value")
        elif flag["value"] is not None:
            yield flag["name"], flag["value"]
        elif rest and not rest[0].startswith("--"):
            yield flag["name"], rest.pop(0)
        else:
            draft.problem(argument, "has no value", f"write {argument} VALUE")


def _takes(section: str, keys: Sequence[str]) -> list[str]:
    """Return the types and words that a setting takes; an empty list for a key of DeepSpeed or an unknown one."""
    info = section_models()[section].model_fields.get(keys[0])
    return [] if info is None else type_names(info.annotation)


def _value(takes: Sequence[str], text: str) -> Any:
    """Parse `text` as TOML; keep it as it is where it is one of the setting's words, or text that the setting takes."""
    if text in takes:
        return text
    parsed = parse_value(text)
    if "TEXT" not in takes:
        return parsed
    kept = {str: "TEXT", list: "LIST", float: "NUMBER", int: "INT"}
    return parsed if kept.get(type(parsed)) in takes else text
