"""Check DeepSpeed's keys: unknown, removed and refused ones, wrong values, and notes on those without effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.deepspeed.effects import IDLE, PASSED_ON, REFUSED, is_off
from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import KEYS, REMOVED, VERSION
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import did_you_mean
from megalite.errors import Problem


def check_keys(block: Block) -> Iterator[Problem]:
    """Yield a problem for each key that DeepSpeed lacks, that megalite refuses, or whose value is of a wrong kind."""
    for path, value in _walk(block.values, ""):
        parent, _, key = path.rpartition(".")
        if path in REMOVED:
            if not is_off(value) and value != -1:
                yield Problem(block.key(path), f"was removed from DeepSpeed {VERSION}", REMOVED[path])
        elif parent in KEYS and key not in KEYS[parent] and path not in IDLE:
            yield Problem(block.key(path), f"DeepSpeed {VERSION} has no such key", _remedy(path))
        elif path in KEYS and not isinstance(value, Mapping):
            yield Problem(
                block.key(path), f"{shown(value)} should be an object", f"it has {', '.join(KEYS[path])}"
            )
        elif path in REFUSED and not _is_harmless(path, value):
            yield Problem(block.key(path), "is not supported by megalite", REFUSED[path][1])
        elif path in PASSED_ON and value != AUTO and (found := problem_of(PASSED_ON[path], value)):
            yield Problem(block.key(path), *found)
    yield from _doubled(block)
    stage = _stage(block)
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        message = f"{shown(stage)} is not a ZeRO stage"
        yield Problem(block.key("zero_optimization.stage"), message, "use 0, 1, 2 or 3")


def _doubled(block: Block) -> Iterator[Problem]:
    """Yield a problem for each key of ZeRO 3 that is given by both of its names, which DeepSpeed refuses."""
    zero = block.values.get("zero_optimization")
    table = zero if isinstance(zero, Mapping) else {}
    for key in table:
        if f"stage3_{key}" in table:
            path = f"zero_optimization.{key}"
            yield Problem(block.key(path), f"and stage3_{key} are two names of one key", "remove one of them")


def idle_notes(block: Block) -> Iterator[str]:
    """Yield one line for each reason why keys have no effect, with all keys that it holds for."""
    reasons: dict[str, list[str]] = {}
    for path, value in _walk(block.values, ""):
        if path in IDLE and not is_off(value):
            reasons.setdefault(IDLE[path], []).append(path)
    for reason, paths in reasons.items():
        have = "have" if len(paths) > 1 else "has"
        yield f"{block.key(', '.join(paths))} {have} no effect: {reason}"


def passed_on(block: Block) -> dict[str, Any]:
    """Return the keys that DeepSpeed is handed as they are, without those that are "auto"."""
    return _chosen(block.values, "")


def _chosen(table: Mapping[str, Any], parent: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else key
        if isinstance(value, Mapping):
            if below := _chosen(value, path):
                found[key] = below
        elif path in PASSED_ON and value != AUTO:
            found[key] = value
    return found


def _walk(table: Mapping[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    """Yield each path of a block and its value, without the keys of blocks whose parameters others check."""
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else key
        yield path, value
        if isinstance(value, Mapping) and path in KEYS:
            yield from _walk(value, path)


def _stage(block: Block) -> Any:
    zero = block.values.get("zero_optimization", {})
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0


def _remedy(path: str) -> str:
    parent, _, key = path.rpartition(".")
    elsewhere = [name for name in _all_keys() if name.rsplit(".", 1)[-1] == key]
    if elsewhere and not parent:
        return f"did you mean {elsewhere[0]}?"
    known = [f"{parent}.{name}" if parent else name for name in KEYS[parent]]
    return did_you_mean(key, [name for name in known if name not in REFUSED]) or "remove it"


def _all_keys() -> Iterator[str]:
    for path, keys in KEYS.items():
        yield from (f"{path}.{key}" if path else key for key in keys)


def _is_harmless(path: str, value: Any) -> bool:
    switched_off = isinstance(value, Mapping) and is_off(value)
    return switched_off or value == AUTO or any(_same(value, each) for each in REFUSED[path][0])


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other if isinstance(other, bool) else value == other
