"""Rows of conversations that follow one another and are cut at the end of each row."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megalite.data.batches.packing import IGNORE_INDEX, SampleRows
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained


@dataclass(frozen=True)
class ConcatenatedRows:
    """Sample i has positions i * S to (i + 1) * S - 1 of all conversations laid end to end; only the last has padding.

    A conversation of n tokens has n - 1 positions, as in ConversationRows, and every trained token is a label exactly
    once. A conversation that the end of a row cuts goes on in the next row as a document of its own.
    """

    token_file: TokenFile
    sequence_length: int

    def __len__(self) -> int:
        return -(-int(self._ends[-1]) // self.sequence_length) if len(self._ends) else 0

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token; 1.0 without rows."""
        return float(self._ends[-1] / (len(self) * self.sequence_length)) if len(self) else 1.0

    @property
    def cut(self) -> int:
        """The number of conversations that go on in another row."""
        first_rows, last_rows = self._begins // self.sequence_length, (self._ends - 1) // self.sequence_length
        return int((first_rows < last_rows).sum())

    def read(self, sample_ids: NDArray[np.int64], pad_id: int) -> SampleRows:
        """Return the rows; each conversation, each rest of one and the padding begins a document."""
        shape = (len(sample_ids), self.sequence_length)
        input_ids = np.full(shape, pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        begins = np.zeros(shape, dtype=bool)
        for row, sample in enumerate(sample_ids.tolist()):
            first = sample * self.sequence_length
            stop = min(first + self.sequence_length, int(self._ends[-1]))
            at = first
            while at < stop:
                document = int(np.searchsorted(self._ends, at, side="right"))
                end = min(stop, int(self._ends[document]))
                start = at - int(self._begins[document])
                tokens = self.token_file.document(document)[start : start + end - at + 1]
                places = slice(at - first, end - first)
                begins[row, at - first] = True
                input_ids[row, places] = ids_of(tokens[:-1])
                labels[row, places] = np.where(is_trained(tokens[1:]), tokens[1:], IGNORE_INDEX)
                at = end
            begins[row, at - first : at - first + 1] = True
        return SampleRows(input_ids, labels, begins)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The position behind each conversation."""
        return np.cumsum(self.token_file.document_lengths - 1, dtype=np.int64)

    @property
    def _begins(self) -> NDArray[np.int64]:
        return self._ends - (self.token_file.document_lengths - 1)
