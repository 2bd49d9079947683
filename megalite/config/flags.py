"""`--section.key value` flags: separate them from a command's own options and apply them over RUN.toml."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.describe import section_models, type_names
from megalite.config.draft import Draft, did_you_mean
from megalite.config.toml import format_value, parse_value, shown
from megalite.errors import ConfigError, Problem

_FLAG = re.compile(r"--(?P<name>\w+(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
UNSET = "none"
COMMAND_LINE = "the command line"


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (a command's own arguments, its `--section.key value` flags), both in their given order.

    A setting that is named without its section is among the flags, where it is a problem beside the others.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        setting = _FLAG.fullmatch(argument) or _with_section(argument)
        (overrides if setting else own).append(argument)
        if setting and "=" not in argument and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def _with_section(argument: str) -> str:
    """Return the flag that is meant by a setting without its section, --steps; "" for any other argument."""
    name = argument.split("=")[0].removeprefix("--").replace("-", "_")
    homes = [section for section, model in section_models().items() if name in model.model_fields]
    return f"--{homes[0]}.{name}" if argument.startswith("--") and homes else ""


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Apply `["--training.steps", "100", "--model.preset=tiny", ...]` to the draft; later flags win.

    Values are TOML (`[1, 2]`, `true`); text needs no quotes; `none` removes a value that the file sets.
    """
    for name, text in _pairs(draft, overrides):
        section, *keys = name.split(".")
        if section not in section_models():
            draft.problem(
                f"--{name}", f"there is no section {section}", did_you_mean(section, section_models())
            )
            continue
        if not isinstance(draft.values.get(section, {}), dict):
            continue  # RUN.toml sets the section to a plain value, which the schema check reports
        table = draft.section(section)
        for key in keys[:-1]:
            inner = table.get(key)
            table[key] = dict(inner) if isinstance(inner, dict) else {}
            table = table[key]
        if text == UNSET:
            table.pop(keys[-1], None)
            continue
        table[keys[-1]] = _value(section, keys, text)
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
        for key, each in value.items():
            yield from _flags_of(f"{name}.{key}", each)
    else:
        value = str(value) if isinstance(value, Path) else value
        try:
            yield f"--{name}={UNSET if value is None else format_value(value)}"
        except TypeError as error:
            raise ConfigError([Problem(name, str(error), "use numbers, text, lists")], "the call") from None


def _pairs(draft: Draft, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        flag = _FLAG.fullmatch(argument)
        if flag is None and (meant := _with_section(argument)):
            draft.problem(argument, "has no section", f"did you mean {meant}?")
            if "=" not in argument and rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif flag is None:
            draft.problem(argument, "is not a setting", "write --section.key value")
        elif flag["value"] is not None:
            yield flag["name"], flag["value"]
        elif rest and not rest[0].startswith("--"):
            yield flag["name"], rest.pop(0)
        else:
            draft.problem(argument, "has no value", f"write {argument} VALUE")


def _value(section: str, keys: Sequence[str], text: str) -> Any:
    """Parse `text` as TOML where the setting takes numbers or lists; keep it as it is where the setting takes text."""
    info = section_models()[section].model_fields.get(keys[0])
    kinds = type_names(info.annotation) if info is not None else []
    if "TEXT" not in kinds:
        return parse_value(text)
    parsed = parse_value(text) if text[:1] in ('"', "'", "[") else text
    return parsed if isinstance(parsed, str | list if "LIST" in kinds else str) else text
