"""`--section.key value` on the command line: split off from a command's own options, and laid over RUN.toml."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.config.describe import section_models, type_names
from megalite.config.draft import Draft, did_you_mean
from megalite.config.toml import parse_value
from megalite.errors import ConfigError, Problem

_FLAG = re.compile(r"--(?P<name>\w+(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
UNSET = "none"
COMMAND_LINE = "the command line"


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and the `--section.key value` pairs among them; each keeps its order.

    Raises ConfigError for a setting without its section.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        _refuse_bare_key(argument)
        flag = _FLAG.fullmatch(argument)
        (overrides if flag else own).append(argument)
        if flag and flag["value"] is None and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def _refuse_bare_key(argument: str) -> None:
    name = argument.split("=")[0].removeprefix("--").replace("-", "_")
    homes = [section for section, model in section_models().items() if name in model.model_fields]
    if argument.startswith("--") and homes:
        remedy = f"did you mean --{homes[0]}.{name}?"
        raise ConfigError([Problem(argument, "has no section", remedy)], COMMAND_LINE)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Lay `["--training.steps", "100", "--model.preset=tiny", ...]` over the draft, later ones over earlier ones.

    Values are TOML (`[1, 2]`, `true`); text needs no quotes; `none` takes a value of the file away.
    """
    for name, text in _pairs(draft, overrides):
        section, *keys = name.split(".")
        if section not in section_models():
            draft.problem(
                f"--{name}", f"there is no section {section}", did_you_mean(section, section_models())
            )
            continue
        if not isinstance(draft.values.get(section, {}), dict):
            continue  # RUN.toml has a value in the section's place, which is a problem of its own
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


def _pairs(draft: Draft, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        flag = _FLAG.fullmatch(argument)
        if flag is None:
            draft.problem(argument, "is not a setting", "write --section.key value")
        elif flag["value"] is not None:
            yield flag["name"], flag["value"]
        elif rest and not rest[0].startswith("--"):
            yield flag["name"], rest.pop(0)
        else:
            draft.problem(argument, "has no value", f"write {argument} VALUE")


def _value(section: str, keys: Sequence[str], text: str) -> Any:
    """What `text` means: TOML where a setting takes numbers or lists, itself where it takes text."""
    info = section_models()[section].model_fields.get(keys[0])
    kinds = type_names(info.annotation) if info is not None else []
    if "TEXT" not in kinds:
        return parse_value(text)
    parsed = parse_value(text) if text[:1] in ('"', "'", "[") else text
    return parsed if isinstance(parsed, str | list if "LIST" in kinds else str) else text
