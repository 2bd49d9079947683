"""Read a YAML or JSON configuration as plain values: no tag makes an object, and the work is bounded."""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megalite.errors import ConfigError, Problem

_LARGEST = 1 << 18
"""Characters that are parsed: the largest published configuration has 20,000."""
_DEEPEST = 32
_MOST_NODES = 20_000
"""Values after aliases are written out, which a few lines of them can make billions of."""
_PLAIN = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")
)
_OPENING = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


# As in YAML 1.2 and in JSON: 1e-4 is a number, and 1:30 and 0123 are texts. PyYAML would read "1e-4", 90 and 83.
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """SafeLoader that leaves dates as text, and reads numbers as YAML 1.2 does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name is PyYAML's
        first: [
            (tag, _NUMBERS.get(tag, pattern)) for tag, pattern in resolvers if not tag.endswith(":timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class _MappingFile:
    path: Path
    text: str
    reader: str


def read_mapping(path: Path, text: str, reader: str) -> dict[str, Any]:
    """Return the keys of a YAML or JSON file. Raises ConfigError, with the line, for one that is no plain mapping.

    reader: who reads it, for the error.
    """
    return deepcopy(_read(_MappingFile(path, text, reader)))


# Each system asks for the keys of a file before one of them reads it.
@lru_cache(maxsize=8)
def _read(source: _MappingFile) -> dict[str, Any]:
    if len(source.text) > _LARGEST:
        _fail(source, f"has more than {_LARGEST:,} characters", "name a configuration")
    values = _read_json(source) if source.path.suffix.lower() == ".json" else _read_yaml(source)
    if not isinstance(values, dict):
        _fail(source, "holds no mapping of keys to values", "write key: value lines")
    return values


def _read_json(source: _MappingFile) -> Any:
    try:
        return json.loads(
            source.text,
            object_pairs_hook=lambda pairs: _without_duplicates(source, pairs),
            parse_constant=str,
        )
    except json.JSONDecodeError as error:
        _fail(source, f"line {error.lineno}, column {error.colno}: {error.msg}", "correct the JSON")
    except RecursionError:
        _fail(source, "is nested too deeply", "name a configuration")
    except ValueError as error:
        _fail(source, str(error), "correct it")


def _without_duplicates(source: _MappingFile, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            _fail(source, f"has the key {key!r} twice", "delete one of the two")
        table[key] = value
    return table


def _read_yaml(source: _MappingFile) -> Any:
    try:
        _check_depth(source)
        loader = _PlainLoader(source.text)
        root = loader.get_single_node()
        if root is None:
            return None
        _count(source, root, {})
        _check_nodes(source, root)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "is no YAML"
        _fail(source, f"{place}{reason}", "correct the YAML")
    except RecursionError:
        _fail(source, "is nested too deeply", "name a configuration")
    except ValueError as error:
        _fail(source, f"holds a value that cannot be read: {error}", "correct it")


def _check_depth(source: _MappingFile) -> None:
    """Events come one by one, without recursion, so a deep file stops here before it costs anything."""
    depth = 0
    for event in yaml.parse(source.text, Loader=_PlainLoader):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        if depth > _DEEPEST:
            _fail(
                source, f"line {event.start_mark.line + 1}: is nested more than {_DEEPEST} deep", "flatten it"
            )


def _count(source: _MappingFile, node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Return the number of values below a node with its aliases written out. counts: of the nodes so far, by id."""
    if id(node) in counts:
        count = counts[id(node)]
        if count is None:
            _fail(source, f"line {_line(node)}: an alias holds itself", "write the values out")
        return count
    counts[id(node)] = None
    total = 1 + sum(_count(source, child, counts) for child in _children(node))
    if total > _MOST_NODES:
        _fail(
            source,
            f"line {_line(node)}: its aliases make more than {_MOST_NODES:,} values",
            "write the values out",
        )
    counts[id(node)] = total
    return total


def _check_nodes(source: _MappingFile, root: yaml.Node) -> None:
    """Refuse tags, keys that are no text, and keys that stand twice, which PyYAML would take silently."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.tag not in _PLAIN:
            message = f"line {_line(node)}: the tag {node.tag} asks for an object"
            _fail(source, message, "write plain text, numbers, lists or keys")
        if isinstance(node, yaml.MappingNode):
            _check_keys(source, node)
        waiting += _children(node)


def _check_keys(source: _MappingFile, node: yaml.MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            _fail(source, f"line {_line(key)}: a key is no text", "write one word before the colon")
        if key.value in lines:
            message = f"line {_line(key)}: the key {key.value} is already in line {lines[key.value]}"
            _fail(source, message, "delete one of the two")
        lines[key.value] = _line(key)
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        # "on" and "1" are keys of a configuration too, not true and a number.
        key.tag = "tag:yaml.org,2002:str" if key.tag in _PLAIN else key.tag


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _fail(source: _MappingFile, message: str, remedy: str) -> NoReturn:
    raise ConfigError([Problem(str(source.path), message, remedy)], source.reader)


def flat(table: Mapping[str, Any], blocks: frozenset[str], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a table; the tables named in `blocks` are entered, others are values."""
    for key, value in table.items():
        name = f"{parent}.{key}" if parent else key
        if isinstance(value, Mapping) and value and name in blocks:
            yield from flat(value, blocks, name)
        else:
            yield name, value
