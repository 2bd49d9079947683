"""Read DeepSpeed's settings from a JSON file or from tables in RUN.toml."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import SettingsDraft
from megalite.errors import Problem

AUTO = "auto"
"""A value in DeepSpeed's JSON that the trainer fills in."""
OURS = ("config", "native_optimizer")
"""Keys of [deepspeed] that belong to megalite, not to DeepSpeed."""


@dataclass
class Block:
    """DeepSpeed's settings, and the file they were read from; None: they are tables of RUN.toml."""

    values: dict[str, Any]
    file: str | None

    def key(self, path: str) -> str:
        return f"{self.file}: {path}" if self.file else f"deepspeed.{path}"

    def origin(self, path: str) -> str:
        return f"{path} in {self.file}" if self.file else f"deepspeed.{path}"

    def fill(self, draft: SettingsDraft, path: str, section: str, key: str, default: Any) -> None:
        """Set `section.key` to DeepSpeed's default for `path`, which the block leaves out, unless the key is set."""
        if default is not None and not draft.has(section, key):
            draft.set(section, key, default, f"DeepSpeed's default of {path}")

    def take(self, draft: SettingsDraft, path: str, section: str, key: str, value: Any) -> None:
        """Set `section.key` to `value`, found at `path`; add a problem if the key already has another value."""
        if value is None or value == AUTO or f"{section}.{key}" in draft.unset:
            return
        if not draft.has(section, key):
            draft.set(section, key, value, self.origin(path))
        elif draft.values[section][key] != value:
            ours = draft.values[section][key]
            draft.problem(
                f"{section}.{key}",
                f"{shown(ours)} ({draft.origin(f'{section}.{key}')}) differs from {shown(value)} ({self.origin(path)})",
                f'make them equal, or write "{AUTO}" in the JSON',
            )


def read_block(draft: SettingsDraft, section: dict[str, Any], run_folder: Path) -> Block:
    """Return the settings of the file that deepspeed.config names, with flags applied, or those of RUN.toml."""
    inline = {key: value for key, value in section.items() if key not in OURS}
    file = section.get("config")
    if file is None:
        return _checked(draft, Block(inline, None))
    if not isinstance(file, str):
        draft.problem("deepspeed.config", f"{shown(file)} is not a path")
        return _checked(draft, Block(inline, None))
    beside = sorted(key for key in inline if not draft.given_by_flag(f"deepspeed.{key}"))
    if beside:
        draft.problem(
            "deepspeed.config",
            f"is set together with deepspeed.{beside[0]}",
            f"move {', '.join(beside)} into {file}",
        )
    path = Path(file)
    if not path.exists() and (run_folder / path).exists():
        path = run_folder / path
    values = _read_json(draft, path)
    draft.incomplete |= {"deepspeed"} if values is None else set()
    return _checked(draft, Block(_merged(values or {}, inline), path.name))


def _checked(draft: SettingsDraft, block: Block) -> Block:
    draft.problems += _value_problems(block, block.values, "")
    return Block(_without_nulls(block.values), block.file)


def _read_json(draft: SettingsDraft, path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(
            path.expanduser().read_text(encoding="utf-8-sig"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        draft.problem(f"{path.name}: line {error.lineno}, column {error.colno}", error.msg, "it must be JSON")
    except OSError as error:
        remedy = "name a file, from here or from the folder of RUN.toml"
        draft.problem("deepspeed.config", f"{path} cannot be read: {error.strerror or error}", remedy)
    except (ValueError, RuntimeError) as error:
        draft.problem("deepspeed.config", f"{path} cannot be read: {error}")
    else:
        if isinstance(values, dict):
            return values
        draft.problem("deepspeed.config", f"{path} holds no JSON object")
    return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(inner, dict) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if both and isinstance(inner, dict) else value
    return merged


def _without_nulls(value: Any) -> Any:
    """Return `value` without the keys that are null: null means "not set", and TOML cannot express it."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def _value_problems(block: Block, value: Any, path: str) -> Iterator[Problem]:
    """Yield values that JSON or TOML cannot express: dates, infinities, nan, and null in a list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _value_problems(block, inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            if inner is None:
                yield Problem(block.key(path), "has a null in a list", "remove it")
            else:
                yield from _value_problems(block, inner, path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(block.key(path), f"{value} is not a finite number")
    elif value is not None and not isinstance(value, str | int | float):
        yield Problem(block.key(path), f"{shown(value)} has a type that JSON lacks", "write it as text")
