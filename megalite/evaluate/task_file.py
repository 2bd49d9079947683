"""Reads the questions of a local task file. No torch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.text.records import records
from megalite.data.text.source_files import source_files
from megalite.errors import DataError
from megalite.evaluate.forms import FORMS, Form, Kind
from megalite.evaluate.questions import ChoiceQuestion, CodeProblem, OpenQuestion
from megalite.evaluate.rows import Row


@dataclass(frozen=True)
class TaskFile:
    """A file of questions.

    path: a .jsonl, .json or parquet file. form: a name of FORMS; None: recognised by the columns of the first row.
    columns: field of the form -> the file's column. limit: only the first questions; None: all. flag: the option that
    names the file, for messages.
    """

    path: Path
    kind: Kind
    form: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    flag: str = "--task"


def questions(
    file: TaskFile, note: Callable[[str], None] = lambda _: None
) -> list[ChoiceQuestion | OpenQuestion | CodeProblem]:
    """Return the questions in order. Raises DataError with file, line, column and remedy.

    note: called with a line about the columns that no question reads.
    """
    unread: Counter[str] = Counter()
    found: list[ChoiceQuestion | OpenQuestion | CodeProblem] = []
    form: Form | None = None
    for values, where in task_rows(file.path, file.flag):
        row = Row(values, where, file.columns)
        if form is None:
            form = FORMS[file.form] if file.form is not None else _recognised(row, file.kind)
        found.append(form.question(row))
        unread.update(name for name in row.unread if name not in form.idle)
        if file.limit is not None and len(found) >= file.limit:
            break
    if not found:
        raise DataError(f"{file.flag}: {file.path} has no questions; name a file with one question a line")
    tell_unread(file.path, unread, note)
    return found


def tell_unread(path: Path, unread: Mapping[str, int], note: Callable[[str], None]) -> None:
    """Name the columns that were not read, each with the number of its rows."""
    if unread:
        columns = ", ".join(f"{name!r} ({count:,})" for name, count in unread.items())
        note(f"note: {path}: columns without effect, and the rows that have them: {columns}")


def task_rows(path: Path, flag: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row with its place for messages. Raises DataError."""
    for source in source_files(str(path), "*", flag):
        for values, where, _ in records(source):
            yield values, where


def _recognised(row: Row, kind: Kind) -> Form:
    of_kind = {name: form for name, form in FORMS.items() if form.kind == kind}
    for name, form in of_kind.items():
        if all(map(row.has, form.fields)):
            # Answers without the mark of GSM8K are compared whole.
            marked = name != "gsm8k" or "####" in str(row.value("answer"))
            if marked:
                return form
    known = "; ".join(f"{name}: {', '.join(form.fields)}" for name, form in of_kind.items())
    name, form = list(of_kind.items())[-1]
    fields = " ".join(f"--field {each}=COLUMN" for each in form.fields)
    raise DataError(
        f"{row.where}: the columns {sorted(row.values)} are of no known form of {kind} ({known}); name the columns, "
        f"for example --form {name} {fields}"
    )
