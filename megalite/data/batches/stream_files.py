"""The files of data.streaming: documents from any place in a .jsonl or .parquet file on, without a pass before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

from megalite.data.text.corpus import TRAINED_COLUMNS, Corpus, json_text, unused_columns
from megalite.data.text.row_counts import RowCounts
from megalite.data.text.source_files import SourceFile, cannot_read
from megalite.data.text.source_stream import json_lines, parse_json, source_stream
from megalite.data.text.tables import column_names, parquet_rows, table_rows
from megalite.data.text.train_marks import untrained_column
from megalite.errors import DataError

# Lines are read this many bytes at a time, and the file is closed between: a rank may read a thousand lanes.
_READ_BYTES = 1 << 18
# The rows of each file whose columns are compared with what is read.
_FIRST_ROWS = 1000


@dataclass(frozen=True)
class StreamFile:
    """A file of documents. A place in it is the byte where a line begins, or the number of a parquet row."""

    path: Path
    size_bytes: int

    @property
    def is_table(self) -> bool:
        return self.path.suffix == ".parquet"

    def first_place(self, byte: int) -> int:
        """Return the place of the first document that begins at `byte` or behind; rows are spread evenly over bytes.

        Raises DataError.
        """
        if self.is_table:
            return -(-byte * parquet_rows(self.path) // max(1, self.size_bytes))
        if byte == 0:
            return 0
        try:
            with self.path.open("rb") as stream:
                stream.seek(byte - 1)
                stream.readline()
                return stream.tell()
        except OSError as error:
            raise cannot_read(self.path, error) from error

    def documents(self, start: int, stop: int, text_column: str) -> Iterator[tuple[str, int]]:
        """Yield the text of each document with a place in [start, stop), and the place behind the document.

        Rows without a value, blank lines and lines that say not to train on them are skipped. Raises DataError with
        file, line or row, and remedy.
        """
        return (self._rows if self.is_table else self._lines)(start, stop, text_column)

    def _rows(self, start: int, stop: int, text_column: str) -> Iterator[tuple[str, int]]:
        for row, number, _ in table_rows(self.path, text_column, first=start):
            if number >= stop:
                return
            if row[text_column] is not None:
                yield row[text_column], number + 1

    def _lines(self, start: int, stop: int, text_column: str) -> Iterator[tuple[str, int]]:
        file = SourceFile(self.path, self.path, "jsonl", self.size_bytes, 0)
        while start < stop:
            with source_stream(file) as (stream, _):
                stream.seek(start)
                lines = stream.readlines(_READ_BYTES)
            if not lines:
                return
            for line in lines:
                if start >= stop:
                    return
                text = self._text(line, start, text_column) if line.strip() else None
                start += len(line)
                if text is not None:
                    yield text, start

    def _text(self, line: bytes, start: int, text_column: str) -> str | None:
        def read(number: int) -> str | None:
            row = parse_json(line.rstrip(b"\r\n"), self.path, number, "fix the line")
            if isinstance(row, dict) and untrained_column(row, TRAINED_COLUMNS):
                return None
            return json_text(row, f"{self.path}, line {number}", text_column)

        try:
            return read(1 if start == 0 else 2)
        except DataError:
            pass
        # Lines are counted for a message only: the file may be very large.
        try:
            return read(1 + self._lines_before(start))
        except DataError as error:
            raise self.bad_line(error) from error

    def bad_line(self, error: DataError) -> DataError:
        """Return the error of a line, with the remedy for a run that has begun."""
        return DataError(
            f"{error}; a run with data.streaming goes on only if the file keeps its {self.size_bytes:,} bytes: "
            "overwrite the line with spaces to skip it, and set checkpoint.resume_changed = true"
        )

    def _lines_before(self, byte: int) -> int:
        lines = 0
        with self.path.open("rb") as stream:
            while byte > 0 and (block := stream.read(min(byte, _READ_BYTES))):
                lines += block.count(b"\n")
                byte -= len(block)
        return lines


def stream_files(corpus: Corpus) -> tuple[StreamFile, ...]:
    """Return the files of a corpus for a run to stream. Raises DataError for a file that cannot be read in parts."""
    for file in corpus.files:
        if file.compressed or not (file.kind == "jsonl" or file.path.suffix == ".parquet"):
            what = "is compressed" if file.compressed else "is neither .jsonl nor .parquet"
            raise DataError(
                f"{corpus.key}: {file.path} {what}, and data.streaming reads from the middle of a file; "
                "write it as .jsonl or .parquet, leave it out (data.pattern), or set data.streaming = false"
            )
    return tuple(StreamFile(file.path, file.size_bytes) for file in corpus.files)


def first_rows(files: Sequence[StreamFile], text_column: str) -> RowCounts:
    """Count the columns without effect in the first rows of each file. Raises DataError."""
    counts = RowCounts()
    for file in files:
        if file.is_table:
            counts.add_row(unused_columns(column_names(file.path), text_column))
            continue
        with source_stream(SourceFile(file.path, file.path, "jsonl", file.size_bytes, 0)) as (stream, _):
            try:
                for row, where in islice(json_lines(file.path, stream), _FIRST_ROWS):
                    if isinstance(row, dict) and untrained_column(row, TRAINED_COLUMNS):
                        counts.left_out += 1
                        continue
                    json_text(row, where, text_column)
                    counts.add_row(unused_columns(row, text_column))
            except DataError as error:
                raise file.bad_line(error) from error
    return counts


@dataclass(frozen=True)
class FileSegment:
    """The part of one file that belongs to a lane: documents with a place in [start, stop). file: its number."""

    file: int
    start: int
    stop: int


def lane_segments(files: Sequence[StreamFile], lane: int, lanes: int) -> list[FileSegment]:
    """Return what lane number `lane` reads: the documents that begin in its share of the bytes of all files.

    The shares are equal, and every document belongs to exactly one lane.
    """
    ends = list(accumulate(file.size_bytes for file in files))
    low, high = (ends[-1] * each // lanes for each in (lane, lane + 1))
    segments = []
    for number, (file, end) in enumerate(zip(files, ends, strict=True)):
        begin = end - file.size_bytes
        if low < end and high > begin:
            start = file.first_place(max(low - begin, 0))
            stop = file.first_place(min(high, end) - begin)
            if start < stop:
                segments.append(FileSegment(number, start, stop))
    return segments
