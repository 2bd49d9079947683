"""Read TOML with line and column in every error; format values so that reading them back gives the same."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError, Problem, closest_path

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\s*(\[\[?)([^\[\]]+)\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")
# The beginnings of tomllib's messages about a key or section that is set a second time.
_SET_TWICE = ("Cannot overwrite", "Cannot declare", "Cannot mutate")
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError, with line and column for a syntax error."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_problem(str(error), text)], str(path)) from error
    except RecursionError:
        raise ConfigError([Problem(str(path), "is nested too deeply")], str(path)) from None


def read_text(path: Path) -> str:
    """Return the text of a run file. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        close = closest_path(path)
        cure = {"RUN.toml": close} if close else {}
        problem = Problem(str(path), "no such file", _files_here(path), cure, value=str(path))
        raise ConfigError([problem], str(path)) from None
    except IsADirectoryError:
        own = path / "run.toml"
        remedy = f"name its run file, {own}" if own.is_file() else _files_here(own)
        cure = {"RUN.toml": str(own)} if own.is_file() else {}
        problem = Problem(str(path), "is a folder", remedy, cure, value=str(path))
        raise ConfigError([problem], str(path)) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), error.strerror or str(error))], str(path)) from error
    except UnicodeDecodeError as error:
        problem = Problem(f"byte {error.start}", "is not UTF-8", "save the file as UTF-8")
        raise ConfigError([problem], str(path)) from error


def setting_lines(text: str) -> dict[str, int]:
    """Return `section.key` -> the number of its line, for the keys that stand alone in a line below [section]."""
    places: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = header[2].strip()
        elif key := _KEY.match(line):
            places.setdefault(f"{section}.{key[1]}", number)
    return places


def _syntax_problem(message: str, text: str) -> Problem:
    """Return the problem that tomllib's message tells; for a key or section set twice with its name and lines."""
    place = _PLACE.search(message)
    last = int(place[1]) if place and place[1] else text.count("\n") + 1
    if message.startswith(_SET_TWICE):
        name, first, second = _set_twice(text.splitlines()[:last])
        return Problem(f"line {second}", f"{name} is already set{first}", "delete one of the two")
    at = f"line {place[1]}, column {place[2]}" if place and place[1] else "end of file"
    return Problem(at, _PLACE.sub("", message), 'write key = value, with text in "quotes"')


def _set_twice(lines: Sequence[str]) -> tuple[str, str, int]:
    """Return (name, " in line N" of its first line, number of its second line) of the first name that stands twice.

    The last line is where tomllib stopped, which is the second one if no name stands twice literally.
    """
    seen: dict[str, int] = {}
    section = ""
    for number, line in enumerate(lines, start=1):
        if header := _HEADER.match(line):
            section = name = f"[{header[2].strip()}]"
            if header[1] == "[[":  # each table of a list has keys of its own
                section = name = f"[{section}] of line {number}"
        elif key := _KEY.match(line):
            name = f"{key[1]} of {section}" if section else key[1]
        else:
            continue
        if name in seen:
            return name, f" in line {seen[name]}", number
        seen[name] = number
    return lines[-1].split("=")[0].strip(), " above", len(lines)


def parse_value(text: str) -> Any:
    """Parse one TOML value; return the text itself where it is not TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def format_value(value: Any) -> str:
    """Format one value as TOML, leaving out a table's None values. Raises TypeError for a type TOML lacks, as None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes the same characters as TOML, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        items = [
            f"{format_key(key)} = {format_value(inner)}" for key, inner in value.items() if inner is not None
        ]
        return "{" + ", ".join(items) + "}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def shown(value: Any) -> str:
    """Format a value for an error message: as TOML if possible, at most 60 characters."""
    try:
        text = format_value(value)
    except TypeError:
        text = "null" if value is None else str(value)  # as YAML and JSON have it
    return text if len(text) <= 60 else f"{text[:57]}..."


def format_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_value(key)


def format_table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table and its inner tables, leaving out None values."""
    yield f"[{name}]"
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{format_key(key)} = {format_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield ""
            yield from format_table(f"{name}.{format_key(key)}", value)


def _files_here(path: Path) -> str:
    """Return a remedy that lists the files of its kind in the folder of a missing path; TOML without a suffix."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    files = [
        file.name for file in path.parent.glob(f"*{path.suffix or '.toml'}") if file.name != "pyproject.toml"
    ]
    names = [str(path.parent / name) for name in sorted(files)[:5]]
    return f"there is {', '.join(names)}" if names else "name a RUN.toml"
