"""Check DeepSpeed's keys: unknown, removed and refused ones, wrong values, and notes on those without effect."""

from collections.abc import Iterator, Mapping
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.keys import EFFECTS, KEYS, VERSION, Idle, KeyEffect, PassedOn, Refused, Removed
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.toml import shown
from megalite.config.sections.unchecked import did_you_mean
from megalite.errors import Problem


def check_keys(block: Block) -> Iterator[Problem]:
    """Yield a problem for each key that DeepSpeed lacks, that megalite refuses, or whose value is of a wrong kind."""
    for path, value in _walk(block.values, ""):
        parent, _, key = path.rpartition(".")
        effect = EFFECTS.get(path)
        if isinstance(effect, Removed):
            if not _is_off(value) and value != -1:
                yield Problem(block.key(path), f"was removed from DeepSpeed {VERSION}", effect.remedy)
        elif effect is None and parent in KEYS and key not in KEYS[parent]:
            yield Problem(block.key(path), f"DeepSpeed {VERSION} has no such key", _remedy(path))
        elif path in KEYS and not isinstance(value, Mapping):
            yield Problem(
                block.key(path), f"{shown(value)} should be an object", f"it has {', '.join(KEYS[path])}"
            )
        elif isinstance(effect, Refused) and not _is_harmless(effect, value):
            yield Problem(block.key(path), "is not supported by megalite", effect.remedy)
        elif isinstance(effect, PassedOn) and value != AUTO and (problem := problem_of(effect.kind, value)):
            yield Problem(block.key(path), *problem)
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
        if (reason := _idle_reason(EFFECTS.get(path), _stage(block))) and not _is_off(value):
            reasons.setdefault(reason, []).append(path)
    for reason, paths in reasons.items():
        have = "have" if len(paths) > 1 else "has"
        yield f"{block.key(', '.join(paths))} {have} no effect: {reason}"


def _idle_reason(effect: KeyEffect | None, stage: Any) -> str:
    """Return why a key has no effect; empty: it has one."""
    if isinstance(effect, Idle):
        return effect.reason
    return effect.idle_under_zero_1 if isinstance(effect, PassedOn) and stage == 1 else ""


def passed_on(block: Block) -> dict[str, Any]:
    """Return the keys that DeepSpeed is handed as they are, without those that are "auto"."""
    return _chosen(block.values, "")


def _chosen(table: Mapping[str, Any], parent: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else key
        if isinstance(value, Mapping):
            if below := _chosen(value, path):
                chosen[key] = below
        elif isinstance(EFFECTS.get(path), PassedOn) and value != AUTO:
            chosen[key] = value
    return chosen


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
    elsewhere = [f"{block}.{key}" for block, names in KEYS.items() if key in names]
    if elsewhere and not parent:
        return f"did you mean {elsewhere[0]}?"
    known = [f"{parent}.{name}" if parent else name for name in KEYS[parent]]
    taken = [name for name in known if not isinstance(EFFECTS.get(name), Refused)]
    return did_you_mean(key, taken) or "remove it"


def _is_harmless(effect: Refused, value: Any) -> bool:
    switched_off = isinstance(value, Mapping) and _is_off(value)
    return switched_off or value == AUTO or any(_same(value, harmless) for harmless in effect.harmless)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other if isinstance(other, bool) else value == other


def _is_off(value: Any) -> bool:
    """Return whether a value switches its key off: false, "auto", nothing, a block of these, `enabled` = false."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(_is_off(inner) for inner in value.values())
    return value in (None, False, AUTO, [])
