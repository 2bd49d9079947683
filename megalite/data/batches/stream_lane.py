"""A lane of data.streaming: an endless row of tokens from one part of the files, which goes on from any place."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megalite.data.batches.stream_files import FileSegment, StreamFile, lane_segments
from megalite.data.text.corpus import cut_document
from megalite.data.tokenizers.encoding import PieceEncoder
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError

# A block of documents is shuffled as a whole; it ends at the first of these.
_BLOCK_DOCUMENTS = 256
_BLOCK_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class LanePlace:
    """A position in the tokens of a lane.

    epoch: the passes through the lane before. file, start: the place where the block of documents begins.
    document: the number of the document in the block's order. token: the tokens of the document before.
    """

    epoch: int = 0
    file: int = 0
    start: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True)
class StreamText:
    """The text that all lanes of a run read, and how.

    text_column, min_length: of the settings. seed: shuffles the documents of each block; None: no shuffle.
    """

    files: tuple[StreamFile, ...]
    text_column: str = "text"
    min_length: int = 0
    seed: int | None = None


class DocumentEncoder:
    """Encodes whole documents, each with its end-of-document id."""

    def __init__(self, tokenizer: Tokenizer):
        self._pieces = PieceEncoder(tokenizer, np.dtype(np.int64))
        self._end = np.array([tokenizer.end_of_document_id], dtype=np.int64)

    def __call__(self, text: str) -> NDArray[np.int64]:
        return np.concatenate([*map(self._pieces.ids, cut_document([text])), self._end])


class Lane:
    """The sequences of one row of the global batch: sequence k has the tokens k * S to k * S + S of the lane.

    The tokens of a lane are those of its documents, each with its end; behind the last, the lane starts again.
    """

    def __init__(
        self,
        text: StreamText,
        number: int,
        lanes: int,
        *,
        encode: Callable[[str], NDArray[np.int64]],
        sequence_length: int,
        remembered: int = 1,
    ):
        """number: of `lanes`. remembered: how many of the last sequences can be read again, and have a `place`.

        Raises DataError.
        """
        self._text, self._number, self._lanes = text, number, lanes
        self._encode, self._length, self._remembered = encode, sequence_length, remembered
        self._segments = lane_segments(text.files, number, lanes)
        self._places: dict[int, LanePlace] = {}
        begin = self._segments[0] if self._segments else FileSegment(0, 0, 0)
        self._begin = LanePlace(file=begin.file, start=begin.start)
        self.go_on(0)

    def go_on(self, sequence: int, place: LanePlace | None = None) -> None:
        """Let sequence number `sequence` begin at `place`; None: at the first document."""
        place = place or self._begin
        self._places = {sequence: place}
        self._restart(sequence, place)

    def place(self, sequence: int) -> LanePlace:
        """Return where a sequence begins: one of the last `remembered`, or the one behind them."""
        return self._places[sequence]

    def sequence(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a sequence and the label of the last: [S + 1].

        Sequences come in order at no further cost; those before the remembered ones cost all that lies before them.
        """
        if number != self._next:
            if number in self._places:
                self._restart(number, self._places[number])
            elif number < self._next:
                self.go_on(0)
        while self._next < number:
            self._read()
        return self._read()

    def _restart(self, sequence: int, place: LanePlace) -> None:
        self._next, self._used = sequence, place.token
        self._documents = self._encoded(place)
        self._buffer: deque[tuple[LanePlace, NDArray[np.int64]]] = deque()

    def _read(self) -> NDArray[np.int64]:
        """Return the next sequence, and remember where the one behind it begins."""
        parts, missing, skipped = [], self._length + 1, self._used
        for _, ids in self._buffer:
            parts.append(ids[skipped : skipped + missing])
            missing, skipped = missing - len(parts[-1]), max(0, skipped - len(ids))
        while missing:
            self._buffer.append(next(self._documents))
            parts.append(self._buffer[-1][1][skipped : skipped + missing])
            missing, skipped = missing - len(parts[-1]), max(0, skipped - len(self._buffer[-1][1]))
        self._used += self._length
        while self._used >= len(self._buffer[0][1]):
            self._used -= len(self._buffer.popleft()[1])
        self._next += 1
        self._places[self._next] = replace(self._buffer[0][0], token=self._used)
        self._places.pop(self._next - self._remembered - 1, None)
        return np.concatenate(parts)

    def _encoded(self, place: LanePlace) -> Iterator[tuple[LanePlace, NDArray[np.int64]]]:
        """Yield the tokens of each document from `place` on with its own place, endlessly."""
        first, last_epoch = place.document, place.epoch
        for begin, texts in self._blocks(place):
            if begin.epoch > last_epoch + 1:
                raise DataError(
                    f"data.source: all documents in part {self._number + 1} of {self._lanes} equal parts of the text "
                    f"have fewer than {self._text.min_length} tokens; lower data.min_length"
                )
            order = self._order(begin, len(texts))
            for number in range(first, len(texts)):
                ids = self._encode(texts[order[number]])
                if len(ids) > max(1, self._text.min_length):
                    last_epoch = begin.epoch
                    yield replace(begin, document=number), ids
            first = 0

    def _blocks(self, place: LanePlace) -> Iterator[tuple[LanePlace, list[str]]]:
        """Yield the blocks of documents from that at `place` on, each with its place, endlessly.

        Raises DataError if there are none in a whole epoch.
        """
        epoch, segments = place.epoch, [each for each in self._segments if each.file >= place.file]
        first = place.start
        while True:
            has_documents = epoch == place.epoch and place != self._begin
            for segment in segments:
                start = max(segment.start, first) if segment.file == place.file else segment.start
                for begin, texts in self._blocks_of(replace(segment, start=start)):
                    has_documents = True
                    yield LanePlace(epoch, segment.file, begin), texts
            if not has_documents:
                raise _no_document(len(self._text.files), self._number, self._lanes)
            epoch, first, segments = epoch + 1, 0, self._segments

    def _blocks_of(self, segment: FileSegment) -> Iterator[tuple[int, list[str]]]:
        """Yield the texts of each block of a segment, with the place where the block begins."""
        begin, texts, characters = segment.start, [], 0
        documents = self._text.files[segment.file].documents(
            segment.start, segment.stop, self._text.text_column
        )
        for text, behind in documents:
            texts.append(text)
            characters += len(text)
            if len(texts) == _BLOCK_DOCUMENTS or characters >= _BLOCK_CHARACTERS:
                yield begin, texts
                begin, texts, characters = behind, [], 0
        if texts:
            yield begin, texts

    def _order(self, begin: LanePlace, documents: int) -> Sequence[int]:
        """Return the order of the documents of a block, another one in each epoch."""
        if self._text.seed is None:
            return range(documents)
        name = f"{self._text.seed} {self._number} {begin.epoch} {begin.file} {begin.start}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        order: list[int] = np.random.default_rng(seed).permutation(documents).tolist()
        return order


def require_documents(
    files: Sequence[StreamFile], lanes: int, text_column: str, *, min_length: int = 0, multiple: int = 1
) -> None:
    """Raise DataError if a lane has no document of `min_length` tokens, or its first documents cannot be read.

    The message has the largest number of lanes that works. multiple: the number of lanes is one of its multiples.
    """
    empty = _empty_lane(files, lanes, text_column, min_length)
    if empty is None:
        return
    # A gap in the text is often still one for fewer lanes, so the search begins there.
    gap, most = empty / lanes, 0
    for fewer in range((lanes - 1) // multiple * multiple, 0, -multiple):
        lane = _empty_lane(files, fewer, text_column, min_length, first=int(gap * fewer))
        if lane is None:
            most = fewer
            break
        gap = lane / fewer
    raise _no_document(len(files), empty, lanes, min_length=min_length, most=most, multiple=multiple)


def _empty_lane(
    files: Sequence[StreamFile], lanes: int, text_column: str, min_length: int, *, first: int = 0
) -> int | None:
    """Return a lane without a document that is long enough, looking from lane `first` on; None: every lane has one."""
    for lane in (*range(first, lanes), *range(first)):
        segments = lane_segments(files, lane, lanes)
        documents = chain.from_iterable(
            files[segment.file].documents(segment.start, segment.stop, text_column) for segment in segments
        )
        # A token has at least a byte, so a text with fewer bytes is too short; ranks count the tokens themselves.
        if not any(len(text.encode()) >= max(1, min_length) for text, _ in documents):
            return lane
    return None


def _no_document(
    files: int, lane: int, lanes: int, *, min_length: int = 0, most: int = 0, multiple: int = 1
) -> DataError:
    long = f" of data.min_length = {min_length} tokens" if min_length > 1 else ""
    of = f" among the multiples of {multiple} (training.micro_batch_size * parallel.data)" * (multiple > 1)
    smaller = f"use training.global_batch_size = {most}, the largest that works{of}, " if most else ""
    return DataError(
        f"data.source: no document{long} begins in part {lane + 1} of {lanes} equal parts of the "
        f"{files} file{'s' if files > 1 else ''}, and each sequence of training.global_batch_size = {lanes} streams a "
        f"part of its own; {smaller}name more text, or set data.streaming = false"
    )
