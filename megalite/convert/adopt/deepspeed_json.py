"""DeepSpeed's JSON beside a script: the answer to each of its keys, as [deepspeed] of a run file reads it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.json_file import AUTO
from megalite.config.deepspeed.keys import EFFECTS, Idle, Implied, PassedOn, Refused, Removed, Silent
from megalite.config.deepspeed.read import apply_deepspeed
from megalite.config.sections.unchecked import SettingsDraft
from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.errors import ConfigError, Problem


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
    draft = SettingsDraft(name)
    draft.values = {"deepspeed": dict(table)}
    apply_deepspeed(draft, Path())
    problems = [problem for problem in draft.problems if problem.key.startswith("deepspeed.")]
    stage = _stage(table)
    for path, value in _leaves(table, ""):
        key = f"deepspeed.{path}"
        wrong = next((each for each in problems if key == each.key or key.startswith(f"{each.key}.")), None)
        written = f"{name}: {path}"
        if wrong is not None:
            answer = KeyAnswer(written, value, Outcome.REFUSED, {}, wrong.message, wrong.remedy, numbers=True)
        else:
            answer = _answer(draft, path, value, written, stage)
        account.add(answer)
    for setting, origin in draft.origins.items():
        if origin.startswith("DeepSpeed's default"):
            section, key = setting.split(".", 1)
            account.default(setting, draft.values[section][key], origin)


def _answer(draft: SettingsDraft, path: str, value: Any, written: str, stage: int) -> KeyAnswer:
    effect = EFFECTS.get(path) or next(
        (EFFECTS[parent] for parent in _parents(path) if parent in EFFECTS), None
    )
    settings = {
        setting: draft.values[setting.split(".")[0]][setting.split(".", 1)[1]]
        for setting, origin in draft.origins.items()
        if origin == f"deepspeed.{path}" and not setting.startswith("deepspeed.")
    }
    if settings:
        return KeyAnswer(written, value, Outcome.TAKEN, settings)
    reason = ""
    if value == AUTO:
        reason = "auto: other settings decide"
    elif path == "zero_optimization.stage" and stage:
        return KeyAnswer(written, value, Outcome.TAKEN, {f"deepspeed.{path}": value})
    elif isinstance(effect, PassedOn):
        if stage and not (effect.idle_under_zero_1 and stage == 1):
            return KeyAnswer(written, value, Outcome.TAKEN, {f"deepspeed.{path}": value})
        reason = effect.idle_under_zero_1 if stage else "DeepSpeed is not used without ZeRO"
    elif isinstance(effect, Idle):
        reason = effect.reason
    elif isinstance(effect, Implied):
        reason = "megalite always does so"
    elif isinstance(effect, Silent | Removed):
        reason = "it is off"
    elif isinstance(effect, Refused):
        reason = "this value is what megalite does"
    return KeyAnswer(written, value, Outcome.NO_EFFECT, {}, reason or "it is off, or the same here")


def _leaves(table: Mapping[str, Any], parent: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _stage(table: Mapping[str, Any]) -> int:
    zero = table.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0
