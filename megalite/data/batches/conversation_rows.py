"""Rows of conversations: packed without cutting, or end to end; each conversation sees its own tokens only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megalite.config.sections.text_sections import DataConfig
from megalite.data.batches.bin_packing import Bins, Strategy, fill, pack
from megalite.data.batches.packing import IGNORE_INDEX, PackedSamples, SampleRows, Samples
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.errors import DataError


@dataclass(frozen=True)
class ConversationRows:
    """Sample i is row i of `packing`: conversations side by side in `sequence_length` positions, then padding.

    A conversation of n tokens has n - 1 positions: inputs are all tokens but the last, labels all but the first,
    and the loss ignores labels that are not trained.
    """

    token_file: TokenFile
    sequence_length: int
    packing: Strategy
    seed: int

    def __post_init__(self) -> None:
        require_short(self.token_file, self.sequence_length)

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token."""
        return fill(self._lengths, self._bins, self.sequence_length)

    def read(self, sample_ids: NDArray[np.int64], pad_id: int) -> SampleRows:
        """Return the rows; each conversation and the padding begins a document."""
        rows = [
            [self.token_file.document(document) for document in self._bins.row(sample).tolist()]
            for sample in sample_ids.tolist()
        ]
        return rows_of_tokens(rows, self.sequence_length, pad_id)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return self.token_file.document_lengths - 1

    @cached_property
    def _bins(self) -> Bins:
        return pack(self._lengths, self.sequence_length, self.packing, self.seed)


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
        rows = [list(self._parts(sample)) for sample in sample_ids.tolist()]
        return rows_of_tokens(rows, self.sequence_length, pad_id)

    def _parts(self, sample: int) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each conversation in a sample, each with the label of its last position."""
        at = sample * self.sequence_length
        stop = min(at + self.sequence_length, int(self._ends[-1]))
        while at < stop:
            document = int(np.searchsorted(self._ends, at, side="right"))
            end = min(stop, int(self._ends[document]))
            start = at - int(self._begins[document])
            yield self.token_file.document(document)[start : start + end - at + 1]
            at = end

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The position behind each conversation."""
        return np.cumsum(self.token_file.document_lengths - 1, dtype=np.int64)

    @property
    def _begins(self) -> NDArray[np.int64]:
        return self._ends - (self.token_file.document_lengths - 1)


def rows_of_tokens(rows: Sequence[Sequence[NDArray[Any]]], length: int, pad_id: int) -> SampleRows:
    """Return rows of `length` positions with marked tokens side by side: n tokens have n - 1 positions."""
    shape = (len(rows), length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    begins, lengths = np.zeros(shape, dtype=bool), np.zeros(len(rows), dtype=np.int64)
    for row, parts in enumerate(rows):
        at = 0
        for tokens in parts:
            end = at + len(tokens) - 1
            begins[row, at] = True
            input_ids[row, at:end] = ids_of(tokens[:-1])
            labels[row, at:end] = np.where(is_trained(tokens[1:]), tokens[1:], IGNORE_INDEX)
            at = end
        begins[row, at : at + 1] = True
        lengths[row] = at
    return SampleRows(input_ids, labels, begins, lengths)


def require_short(file: TokenFile, sequence_length: int) -> None:
    """Raise DataError if a conversation does not fit `sequence_length` positions."""
    longest = int(file.document_lengths.max(initial=0)) - 1
    if longest > sequence_length:
        raise DataError(
            f"{file.prefix} has a conversation of {longest + 1} tokens, and training.sequence_length = "
            f"{sequence_length} holds {sequence_length + 1}; raise it to {longest}, set "
            'data.packing = "concatenate", or name the conversations themselves as data.source'
        )


Packing = Literal["concatenate"] | Strategy


def rows_of(
    file: TokenFile, sequence_length: int, packing: Packing, seed: int
) -> ConversationRows | ConcatenatedRows:
    """Return the rows of a file of conversations. packing: data.packing. Raises DataError for too long ones."""
    if packing == "concatenate":
        return ConcatenatedRows(file, sequence_length)
    return ConversationRows(file, sequence_length, packing, seed)


def samples_of(data: DataConfig, seed: int) -> Callable[[TokenFile, int], Samples]:
    """Return what makes the samples of a run's token files: of text, or of conversations."""
    if data.kind == "text":
        return PackedSamples
    return lambda file, length: rows_of(file, length, packing_of(data), seed)


def packing_of(data: DataConfig) -> Packing:
    """Return how conversations share rows; each answer of a pair has a row of its own."""
    return "none" if data.kind == "preference" else data.packing
