"""Counts rows, messages and their keys without effect, so that nothing of a source is dropped without a word."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.errors import counted

_SHOWN = 8


@dataclass
class RowCounts:
    """rows, messages: those read. columns: column without effect -> rows with it; keys: the same of messages.

    more_samples: those that conversations became beyond one for each. left_out: rows that say not to train on them.
    """

    rows: int = 0
    messages: int = 0
    more_samples: int = 0
    columns: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    left_out: int = 0

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "RowCounts":
        """Return the counts of a journal or of X.json; {} of earlier versions."""
        counters = {name: Counter(content.get(name, {})) for name in ("columns", "keys")}
        return cls(**{**content, **counters})

    @property
    def as_json(self) -> dict[str, Any]:
        """The counts for a journal or X.json."""
        return {**vars(self), "columns": dict(self.columns), "keys": dict(self.keys)}

    def add_row(self, columns: Iterable[str]) -> None:
        """Count a row with its columns without effect."""
        self.rows += 1
        self.columns.update(columns)

    def add_messages(self, keys: Iterable[Iterable[str]]) -> None:
        """Count messages with their keys without effect."""
        for of_message in keys:
            self.messages += 1
            self.keys.update(of_message)

    def add(self, other: "RowCounts") -> None:
        """Add the counts of further rows."""
        self.rows += other.rows
        self.messages += other.messages
        self.more_samples += other.more_samples
        self.left_out += other.left_out
        self.columns.update(other.columns)
        self.keys.update(other.keys)

    def sentences(self, sources: Iterable[str], row: str = "row") -> Iterator[str]:
        """Yield a line for the keys without effect and one for conversations of several samples, if there are any.

        row: what was counted, for the text.
        """
        named, said = ", ".join(sources), []
        if self.left_out:
            yield (
                f"data: {self.left_out:,} of {counted(self.rows + self.left_out, row)} of {named} say not to train on "
                "them (weight 0, train false) and are left out, as are later ones"
            )
        if self.more_samples:
            yield (
                "data: the chat template rewrites earlier answers, so each is a sample behind its own prompt: "
                f"{counted(self.rows, 'conversation')} in {named} became {self.rows + self.more_samples:,} samples"
            )
        for what, counts, total in (
            (row, self.columns, self.rows),
            ("message", self.keys, self.messages),
        ):
            names = [f"{name!r} in {count:,}" for name, count in counts.most_common(_SHOWN)]
            if len(counts) > _SHOWN:
                names.append(f"{len(counts) - _SHOWN} other keys")
            if names:
                said.append(f"{', '.join(names)} of {counted(total, what)}")
        if said:
            yield f"data: keys without effect in {named}: {'; '.join(said)}"
