"""DeepSpeed's keys, in its JSON or among those of another program, answered as [deepspeed] of a run file reads them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from megalite.config.deepspeed.json_file import AUTO
from megalite.config.deepspeed.keys import EFFECTS, KEYS, Idle, Implied, PassedOn, Refused, Removed, Silent
from megalite.config.deepspeed.read import apply_deepspeed
from megalite.config.sections.describe import setting as field_of
from megalite.config.sections.unchecked import SettingsDraft
from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.errors import ConfigError, Problem

NAMES = frozenset(
    name
    for path, effect in EFFECTS.items()
    for name in (path, *(f"{path}.{inner}" for inner in effect.keys.split()))
)
"""DeepSpeed's keys, tables with dots."""
BLOCKS = frozenset(name for name in KEYS if name and not isinstance(EFFECTS.get(name), Refused))
"""DeepSpeed's tables whose keys are answered one by one."""
_ZERO = "zero_optimization"
_OLDER = {
    _ZERO: f"{_ZERO}.stage",
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer.device",
    f"{_ZERO}.cpu_offload_param": f"{_ZERO}.offload_param.device",
}
"""Older forms of a key -> today's."""


def read_json(content: str, name: str) -> dict[str, Any]:
    """Return a JSON object. Raises ConfigError."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(name, f"is no JSON: {error}", "correct it")], "megalite adopt") from None
    if not isinstance(table, dict):
        raise ConfigError([Problem(name, "holds no JSON object", "name DeepSpeed's JSON")], "megalite adopt")
    return table


def answer_json(account: Account, table: Mapping[str, Any], name: str) -> None:
    """Add the answer to each key of the JSON. name: of its file."""
    answer_keys(account, table, dict(_leaves(table)), lambda path: f"{name}: {path}")


def answer_keys(
    account: Account, table: Mapping[str, Any], leaves: Mapping[str, Any], written: Callable[[str], str]
) -> None:
    """Add the answer to each of the keys.

    table: as DeepSpeed gets it. leaves: dotted key -> value of the keys to answer. written: returns a key as written.
    """
    draft = SettingsDraft("DeepSpeed's keys")
    draft.values = {"deepspeed": dict(table)}
    apply_deepspeed(draft, Path())
    problems = [problem for problem in draft.problems if problem.key.startswith("deepspeed.")]
    for path, value in leaves.items():
        key = f"deepspeed.{path}."
        wrong = next((one for one in problems if _overlap(key, f"{one.key}.")), None)
        settings = _settings(draft, path)
        if wrong is None:
            wrong = next(filter(None, map(_unusable, settings.items())), None)
        if wrong is not None:
            outcome, reason, remedy = Outcome.REFUSED, wrong.message, wrong.remedy
            account.add(KeyAnswer(written(path), value, outcome, {}, reason, remedy, numbers=True))
            continue
        changed = path in _OLDER or (value == AUTO and AUTO not in settings.values())
        outcome = Outcome.CHANGED if changed else Outcome.TAKEN
        reason = "" if not changed else "today's form" if path in _OLDER else "DeepSpeed's choice for it"
        if not settings:
            outcome, reason = Outcome.NO_EFFECT, _idle_reason(path, value, _stage(draft))
        account.add(KeyAnswer(written(path), value, outcome, settings, reason))
    for missing in problems:
        path = missing.key.removeprefix("deepspeed.")
        if not any(_overlap(f"{leaf}.", f"{path}.") for leaf in leaves):
            reason, remedy = missing.message, missing.remedy
            account.add(KeyAnswer(written(path), None, Outcome.REFUSED, {}, reason, remedy, numbers=True))
    for setting, origin in draft.origins.items():
        if origin.startswith("DeepSpeed's default"):
            section, key = setting.split(".", 1)
            account.default(setting, draft.values[section][key], origin)


def _settings(draft: SettingsDraft, path: str) -> dict[str, Any]:
    """Return the settings that a key becomes: our own, and those that DeepSpeed is handed under ZeRO."""
    settings: dict[str, Any] = {}
    for setting, origin in draft.origins.items():
        if origin == f"deepspeed.{path}" and not setting.startswith("deepspeed."):
            section, key = setting.split(".", 1)
            settings[setting] = draft.values[section][key]
    handed = dict(_leaves(draft.values["deepspeed"]))
    today, stage = _OLDER.get(path, path), _stage(draft)
    effect = EFFECTS.get(today)
    idle = isinstance(effect, PassedOn) and effect.idle_under_zero_1 and stage == 1
    if today in handed and ((stage and not idle) or today.startswith("scheduler.")):
        settings[f"deepspeed.{today}"] = handed[today]
    return settings


def _stage(draft: SettingsDraft) -> int:
    zero = draft.values["deepspeed"].get(_ZERO)
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _unusable(item: tuple[str, Any]) -> Problem | None:
    """Return the problem of a value that its setting cannot have."""
    setting, value = item
    if setting.startswith("deepspeed."):
        return None
    field = field_of(setting)
    kind: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        return Problem(setting, f"{setting}: {error.errors()[0]['msg']}", "correct it")
    return None


def _idle_reason(path: str, value: Any, stage: int) -> str:
    effect = next((EFFECTS[name] for name in _and_parents(path) if name in EFFECTS), None)
    if value == AUTO:
        return "auto: other settings decide"
    if isinstance(effect, PassedOn):
        return effect.idle_under_zero_1 if stage else "DeepSpeed is not used without ZeRO"
    if isinstance(effect, Idle):
        return effect.reason
    if isinstance(effect, Implied):
        return "megalite always does so"
    if isinstance(effect, Silent | Removed):
        return "it is off"
    return (
        "this value is what megalite does" if isinstance(effect, Refused) else "it is off, or the same here"
    )


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _leaves(table: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _and_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
