"""Arguments of Megatron-LM: words of a command line by name, and the answer to each by the tables."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.config.sections.toml import format_value
from megalite.convert.adopt.account import Account, Outcome
from megalite.convert.adopt.megatron.rules import RENAMED, RULES, SEVERAL, with_prefixes
from megalite.convert.adopt.rules import (
    Change,
    NoEffect,
    Reading,
    Switch,
    Take,
    Together,
    WordsOf,
    apply_rules,
)
from megalite.convert.adopt.shell.expand import as_source, unknown_parts
from megalite.convert.adopt.sink_keys import SinkKey
from megalite.errors import Problem

_LIKE_ARGUMENTS = re.compile(r"arg|opt|flag|extra|cmd", re.IGNORECASE)
# They take no value, so that an unknown word behind them is an argument of its own.
_SWITCHES = frozenset(key for key, rule in RULES.items() if isinstance(rule, Switch)) | {
    "swiglu",
    "sequence-parallel",
    "use-distributed-optimizer",
    "deepspeed",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "use-flash-attn",
    "recompute-activations",
    "checkpoint-activations",
}


def answer_arguments(account: Account, keys: dict[str, Any], names: dict[str, str]) -> Reading:
    """Answer arguments by the tables. keys: without hyphens, with unknown parts marked; names: as written."""
    rules = with_prefixes(keys)
    known = {key: _as_written(value) for key, value in keys.items()}
    reading = Reading(account, known, names)
    for key, value in keys.items():
        missing = [part for word in _words(value) for part in unknown_parts(word)]
        if not missing or isinstance(rules.get(key), NoEffect) or key in ("load", "tensorboard-dir"):
            continue
        if key == "save":
            reading.change(key, {}, "known only in a run: set run.folder")
        elif isinstance(rules.get(key), SinkKey):
            reading.change(key, {}, "known only in a run: set it in [monitor]")
        else:
            reason = f"its value {missing[0]} is known only when the script runs"
            reading.refuse(key, reason, f"add --set {variable_of(missing[0])}=VALUE")
    apply_rules(reading, rules)
    return reading


def arguments_of(
    words: Sequence[str],
) -> tuple[dict[str, Any], dict[str, str], list[str], list[tuple[str, Any]]]:
    """Return arguments by name, their names as written, words that belong to none, and arguments that come again."""
    keys: dict[str, Any] = {}
    names: dict[str, str] = {}
    strays: list[str] = []
    repeated: list[tuple[str, Any]] = []
    values: list[str] = []
    takes = 0
    for word in words:
        if word.startswith("--"):
            written, equals, value = word.partition("=")
            key = argument_key(word)
            if key in keys:
                repeated.append((names[key], " ".join(map(as_source, keys.pop(key))) or None))
            values = [value] if equals else []
            names[key], keys[key] = written, values
            takes = 0 if equals or key in _SWITCHES else _values_of(key)
        elif takes and not _is_arguments(word):
            values.append(word)
            takes -= 1
        else:
            strays.append(word)
    single = {
        key: None if not items else items if key in SEVERAL or len(items) > 1 else items[0]
        for key, items in keys.items()
    }
    return single, names, strays, repeated


def _values_of(key: str) -> int:
    """Return the most values that an argument takes; a list's, and those of one that is not read, have no limit."""
    rule = RULES.get(key)
    several = key in (*SEVERAL, "split") or not isinstance(rule, Take | Together | Change | WordsOf)
    return 1 << 20 if several else 1


def argument_key(word: str) -> str:
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    name = name if name != "DDP-impl" else "ddp-impl"
    return RENAMED.get(name, name)


def _is_arguments(word: str) -> bool:
    """Return whether a wholly unknown word is a variable of further arguments, rather than a value."""
    parts = unknown_parts(word)
    return len(parts) == 1 and as_source(word) == parts[0] and bool(_LIKE_ARGUMENTS.search(parts[0]))


def variable_of(part: str) -> str:
    name = re.match(r"\$\{?([A-Za-z_]\w*|\d+)", part)
    return name[1] if name else "NAME"


def _words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _as_written(value: Any) -> Any:
    return (
        [as_source(word) for word in value]
        if isinstance(value, list)
        else value
        if value is None
        else as_source(value)
    )


def megatron_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem, with our settings and their values, for each argument of Megatron-LM among flags of ours."""
    typed, names, _, _ = arguments_of([word for word in words if not _is_setting(word)])
    typed = {key: value for key, value in typed.items() if key in with_prefixes(typed)}
    account = Account("Megatron-LM")
    of_experts = any(key.startswith(("moe-", "expert-", "num-experts")) for key in typed)
    smallest = _SMALLEST | (_SMALLEST_MIXTURE if of_experts else {})
    others = {key: value for key, value in smallest.items() if key not in typed}
    answer_arguments(account, typed | others, names | {key: key for key in others})
    for answer in account.answers:
        if answer.key in others:
            continue
        if answer.settings:
            flags = " ".join(f"--{name} {_typed(value)}" for name, value in answer.settings.items())
            remedy = f"write {flags}"
        elif answer.outcome is Outcome.REFUSED:
            remedy = f"{answer.reason}; {answer.remedy}"
        else:
            remedy = f"leave it out: {answer.reason or 'it already is so here'}"
        yield Problem(answer.key, "is a flag of Megatron-LM", remedy)


# A model around single arguments, so that each can be read.
_SMALLEST = {
    "num-layers": "1",
    "hidden-size": "128",
    "num-attention-heads": "1",
    "max-position-embeddings": "1",
}
_SMALLEST_MIXTURE = {"num-experts": "2", "swiglu": None, "disable-bias-linear": None}


def _is_setting(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def _typed(value: Any) -> str:
    """Return a value as it is typed behind a flag."""
    text = value if isinstance(value, str) else format_value(value)
    return f"'{text}'" if any(letter in text for letter in ' []{}"') else text
