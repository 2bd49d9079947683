"""The account as lines to print, and the run file that it makes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.sections.describe import section_models
from megalite.config.sections.toml import format_table, format_value, shown
from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.errors import ConfigError, Problem

_ORDER = (Outcome.REFUSED, Outcome.CHANGED, Outcome.TAKEN, Outcome.NO_EFFECT)
_COMMENT = 110


def account_lines(account: Account) -> Iterator[str]:
    """Yield the account: refused keys first, then changed, taken and idle ones, silent defaults and notes.

    Texts of the files cannot steer the terminal: control characters are written out.
    """
    yield from map(_one_line, _lines(account))


def _lines(account: Account) -> Iterator[str]:
    counts = ", ".join(f"{len(account.with_outcome(outcome))} {outcome.value}" for outcome in _ORDER)
    yield f"{account.system}: {len(account.answers)} keys: {counts}"
    for outcome in _ORDER:
        answers = account.with_outcome(outcome)
        if answers:
            yield from ("", f"{outcome.value}:")
        yield from (f"  {answer_line(answer)}" for answer in answers)
    if account.silent:
        yield from ("", f"defaults of {account.system}, written out since the files are silent:")
    for default in account.silent:
        yield f"  {default.setting} = {shown(default.value)}: {default.reason}"
    if account.notes:
        yield from ("", "differences that no setting removes:")
    yield from (f"  {note}" for note in account.notes)
    if account.script:
        yield from ("", "how it was read; nothing of it was executed:")
    yield from (f"  {note}" for note in account.script)
    if account.continues:
        yield from ("", "to continue the run, with RUN.toml the file that is written:")
    yield from (f"  {command}" for command in account.continues)
    if account.launch:
        yield from ("", f"to start it: megalite launch {' '.join(account.launch)} RUN.toml")


def answer_line(answer: KeyAnswer) -> str:
    """Return one answer: "--lr 1e-4 -> optimizer.learning_rate = 0.0001"."""
    line = answer.key if answer.value is None else f"{answer.key} {_as_written(answer.value)}"
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
        lines.append(f"# refused: {answer_line(answer)}"[:_COMMENT])
    tables = nested(account.settings)
    for name in section_models():
        if name in tables:
            lines += ["", *format_table(name, tables[name])]
    return "".join(f"{_one_line(line)}\n" for line in lines)


def write_run_file(account: Account, path: Path, sources: str) -> None:
    """Write the run file. Raises ConfigError where it cannot be written."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(run_file_text(account, sources), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        problem = Problem(str(path), f"cannot be written: {error.strerror}", "name another --output")
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
