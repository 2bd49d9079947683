"""The columns of one row of a task file, checked as they are read. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.data.text.source_stream import json_type
from megalite.errors import DataError

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Row:
    """One row.

    where: file and line, for messages. columns: field of a form -> the row's column, where they differ. read: the
    columns that have been read.
    """

    values: Mapping[str, Any]
    where: str
    columns: Mapping[str, str]
    read: set[str] = field(default_factory=set, compare=False)

    @property
    def unread(self) -> list[str]:
        """The columns that nothing has read."""
        return [column for column in self.values if column not in self.read]

    def has(self, field: str) -> bool:
        return self._column(field) in self.values

    def value(self, field: str) -> Any:
        """Return the value of a field; DataError if the row has no such column."""
        column = self._column(field)
        if column not in self.values:
            raise DataError(
                f"{self.where}: no column {column!r} (columns: {sorted(self.values)}); fix the row, or name the column "
                f"with --field {field}=COLUMN"
            )
        self.read.add(column)
        return self.values[column]

    def text(self, field: str) -> str:
        """Return a text."""
        value = self.value(field)
        if not isinstance(value, str):
            raise self.wrong(field, f"holds {json_type(value)}, not text", "fix the row")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a list of at least two texts, none of them empty."""
        value = self.value(field)
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self.wrong(
                field, f"holds {json_type(value)}, not a list of texts", "write one text a choice"
            )
        if len(value) < 2:
            raise self.wrong(field, f"has {len(value)} choices", "write two or more")
        return tuple(value)

    def label(self, field: str, labels: tuple[str, ...]) -> int:
        """Return the index of the right choice, named by its label."""
        value = str(self.value(field)).strip()
        if value not in labels:
            raise self.wrong(field, f"{value!r} is none of the choices", f"use one of {', '.join(labels)}")
        return labels.index(value)

    def choice(self, field: str, count: int) -> int:
        """Return the index of the right choice: a number from 0, or a letter from A."""
        value = self.value(field)
        written = value.strip() if isinstance(value, str) else value
        if isinstance(written, str) and len(written) == 1 and written in LETTERS:
            written = LETTERS.index(written)
        elif isinstance(written, str) and written.isdecimal():
            written = int(written)
        if isinstance(written, bool) or not isinstance(written, int) or not 0 <= written < count:
            last = f"0 to {count - 1}, or A to {LETTERS[min(count, len(LETTERS)) - 1]}"
            raise self.wrong(field, f"{value!r} is none of the {count} choices", f"use {last}")
        return written

    def wrong(self, field: str, message: str, remedy: str) -> DataError:
        """Return the error of a field's value."""
        return DataError(f"{self.where}: column {self._column(field)!r} {message}; {remedy}")

    def _column(self, field: str) -> str:
        return self.columns.get(field, field)
