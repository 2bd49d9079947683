"""The account as lines to print, and the run file that it makes."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from megalite.config.sections.describe import section_models
from megalite.config.sections.toml import format_table, format_value, shown
from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.errors import ConfigError, Problem, write_remedy

_COUNTED = (Outcome.TAKEN, Outcome.NO_EFFECT)
_ORDER = (*_COUNTED, Outcome.CHANGED, Outcome.REFUSED)
_COMMENT = 110
_SECRET = re.compile(r"(api_key|secret|password|(hub|auth|access)_token|webhook_url)$")
_NAMES = 4


def account_lines(account: Account, *, every: bool = False) -> Iterator[str]:
    """Yield the account: taken, idle and changed keys, silent defaults, notes, then refused keys and what to run first.

    every: a line for each taken and idle key, which are otherwise counted. Texts of the files cannot steer the
    terminal: control characters are written out.
    """
    yield from map(_one_line, _lines(account, every))


def account_report(account: Account) -> dict[str, Any]:
    """Return the account for programs; without values of keys, some of which are secrets."""
    keys = [
        {
            "key": answer.key,
            "outcome": answer.outcome.value,
            "settings": dict(answer.settings),
            "reason": answer.reason,
            "remedy": answer.remedy,
            "changes_numbers": answer.numbers,
        }
        for answer in account.answers
    ]
    names = ("system", "settings", "launch", "ranks", "notes", "script", "continues")
    return {"keys": keys, **{name: getattr(account, name) for name in names}}


def _lines(account: Account, every: bool) -> Iterator[str]:
    counts = ", ".join(f"{len(account.with_outcome(outcome))} {outcome.value}" for outcome in _ORDER)
    yield f"{account.system}: {len(account.answers)} keys: {counts}"
    if not every:
        yield from _counted(account)
    for outcome in (*_COUNTED, Outcome.CHANGED) if every else (Outcome.CHANGED,):
        yield from _section(f"{outcome.value}:", map(answer_line, account.with_outcome(outcome)))
    silent = [f"{default.setting} = {shown(default.value)}: {default.reason}" for default in account.silent]
    yield from _section(f"defaults of {account.system}, written out since the files are silent:", silent)
    yield from _section("differences that no setting removes:", account.notes)
    yield from _section("how it was read; nothing of it was executed:", account.script)
    if account.launch:
        yield from ("", f"to start it: megalite launch {' '.join(account.launch)} RUN.toml")
    refused = account.with_outcome(Outcome.REFUSED)
    yield from _section(f"{Outcome.REFUSED.value}:", map(answer_line, refused))
    several = "to continue from the checkpoint, in this order, with RUN.toml the file that is written:"
    one = "to continue from the checkpoint, to be run first:"
    yield from _section(several if len(account.continues) > 1 else one, account.continues)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if not number:
            yield from ("", title)
        yield f"  {line}"


def _counted(account: Account) -> Iterator[str]:
    """Yield a line for the taken keys and one for the idle ones, with the first names of each."""
    for outcome in _COUNTED:
        names = [answer.key for answer in account.with_outcome(outcome)]
        if names:
            some = ", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else "")
            yield f"{outcome.value}: {len(names)} ({some}); --all lists them"


def answer_line(answer: KeyAnswer) -> str:
    """Return one answer: "--lr 1e-4 -> optimizer.learning_rate = 0.0001"."""
    secret = _SECRET.search(answer.key.replace("-", "_")) is not None
    value = "(not shown)" if secret else _as_written(answer.value)
    line = answer.key if answer.value is None else f"{answer.key} {value}"
    if answer.settings:
        line += " -> " + ", ".join(f"{name} = {shown(value)}" for name, value in answer.settings.items())
    if answer.reason:
        line += f": {answer.reason}"
    if answer.remedy:
        line += f"; {answer.remedy}"
    if answer.outcome is Outcome.REFUSED and not answer.numbers:
        line += " (the numbers stay the same)"
    return line


def run_file_text(account: Account, sources: str) -> str:
    """Return the run file. sources: the adopted files, named in its first line."""
    lines = [f"# megalite adopt {sources}: {account.system}"]
    for answer in account.with_outcome(Outcome.REFUSED):
        lines += _comment(f"refused: {answer_line(answer)}")
    tables = nested(account.settings)
    for name in section_models():
        if name in tables:
            lines += ["", *format_table(name, tables[name])]
    return "".join(f"{_one_line(line)}\n" for line in lines)


def _comment(line: str) -> list[str]:
    """Return a line as lines of a comment; a word that is longer than one, such as a command's path, stays whole."""
    return wrap(
        _one_line(line),
        _COMMENT,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_run_file(account: Account, path: Path, sources: str) -> None:
    """Write the run file. Raises ConfigError where it cannot be written."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(run_file_text(account, sources), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        remedy = write_remedy(error, full="") or "name another --output"
        problem = Problem(str(path), f"cannot be written: {error.strerror}", remedy)
        raise ConfigError([problem], "megalite adopt") from None


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return "section.key.inner" -> value as tables within tables."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def _as_written(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = " ".join(value)
    return _one_line(value if isinstance(value, str) else shown(value))[:80]


def _one_line(line: str) -> str:
    """Return a line without control characters, which end a comment of TOML."""
    return "".join(letter if letter.isprintable() else format_value(letter)[1:-1] for letter in line)
