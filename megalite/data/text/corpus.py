"""Reads documents from text, .jsonl, their .gz, parquet, Arrow and Python's standard library, in bounded memory."""

import codecs
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.data.text.source_files import SourceFile, source_files
from megalite.data.text.source_stream import json_lines, not_utf8, source_stream, without_surrogates
from megalite.data.text.tables import column_names, table_rows
from megalite.data.text.train_marks import refuse_untrained
from megalite.errors import DataError
from megalite.monitor.preparation import megabytes
from megalite.monitor.work import working

# The columns that may say not to train on a row of text; the others are words of chat formats.
TRAINED_COLUMNS = ("weight", "train")
# The size of a piece in characters: the unit of work and of memory; longer documents are cut.
PIECE_CHARACTERS = 1 << 18
_BLOCK_BYTES = 1 << 20
# The usual ratio of text to a compressed file or a table.
_COMPRESSION = 3


@dataclass(frozen=True)
class DocumentPiece:
    """Contiguous text of one document; a document longer than PIECE_CHARACTERS has several pieces.

    unused: the columns without effect of the row that ends with the piece; None: it ends no row.
    """

    text: str
    ends_document: bool
    starts_document: bool = True
    unused: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Place:
    """A position in a corpus: whole files read, pieces read of the next file, bytes read on disk in all."""

    files: int = 0
    pieces: int = 0
    bytes_read: int = 0


@dataclass(frozen=True)
class Corpus:
    """The files of one or more sources in reading order, which is the same on every machine."""

    sources: tuple[str, ...]
    files: tuple[SourceFile, ...]
    text_column: str
    key: str
    """The setting that names the sources, for messages."""

    @classmethod
    def open(
        cls, sources: Sequence[str], *, text_column: str = "text", pattern: str = "*", key: str = "--source"
    ) -> "Corpus":
        """Find the files of all sources; `pattern` selects among the files of a folder, at any depth.

        Raises DataError for a source that does not exist, is a prepared token file, or has no files.
        """
        files = tuple(file for source in sources for file in source_files(source, pattern, key))
        if not files:
            raise DataError(
                f"{key}: no source is given; name a text file, a folder, a .jsonl, a .parquet or stdlib"
            )
        return cls(tuple(sources), files, text_column, key)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files on disk, compressed files as they are."""
        return sum(file.size_bytes for file in self.files)

    @property
    def text_bytes(self) -> int:
        """The bytes of text, estimated for compressed files and tables."""
        return sum(
            file.size_bytes * (_COMPRESSION if file.compressed or file.kind == "table" else 1)
            for file in self.files
        )

    @cached_property
    def stat_fingerprint(self) -> str:
        """A hash that changes when a file is moved, added, removed, resized or changed at all; reads no file."""
        return self._hash(
            [(str(file.place), file.kind, file.size_bytes, file.changed_ns) for file in self.files]
        )

    @cached_property
    def content_fingerprint(self) -> str:
        """A hash of the contents in reading order, equal wherever the files lie; reads every byte once."""
        with working(f"{self.key}: reading {megabytes(self.size_bytes)} to compare the text by its content"):
            return self._hash([(file.kind, file.size_bytes, file.content_hash()) for file in self.files])

    def require_text(self) -> None:
        """Raise DataError if there is nothing but white space; reads up to the first other character."""
        if all(piece.text.isspace() for piece, _ in self.pieces()):
            size = (
                f"{len(self.files)} file{'s' if len(self.files) > 1 else ''} with {self.size_bytes:,} bytes"
            )
            raise DataError(
                f"{self.key}: {', '.join(self.sources)} has no text ({size}, nothing but white space); "
                "name a source with text"
            )

    def _hash(self, files: Sequence[tuple[str | int, ...]]) -> str:
        return hashlib.blake2b(json.dumps([files, self.text_column]).encode(), digest_size=16).hexdigest()

    def pieces(self, after: Place | None = None) -> Iterator[tuple[DocumentPiece, Place]]:
        """Yield the pieces of all documents in order, each with the position after it; start at `after` if given.

        Empty documents are skipped. Raises DataError with file, line and remedy.
        """
        after = after or Place()
        before = sum(file.size_bytes for file in self.files[: after.files])
        for index, file in enumerate(self.files[after.files :], start=after.files):
            skipped = after.pieces if index == after.files else 0
            for count, (piece, position) in enumerate(self.documents(file), start=1):
                if count > skipped:
                    yield piece, Place(index, count, before + min(position, file.size_bytes))
            before += file.size_bytes

    def documents(self, file: SourceFile) -> Iterator[tuple[DocumentPiece, int]]:
        """Yield the pieces of one file, each with the bytes of the file read so far."""
        column = self.text_column
        if file.kind == "table":
            unused = unused_columns(column_names(file.path), column)
            for row, number, position in table_rows(file.path, column):
                if row[column] is None:
                    raise DataError(
                        f"{file.path}, row {number}: column {column!r} has no value; remove the rows without text"
                    )
                for piece in cut_document([row[column]], unused=unused):
                    yield piece, position
            return
        with source_stream(file) as (stream, position_on_disk):
            if file.kind == "jsonl":
                for row, where in json_lines(file.path, stream):
                    text = json_text(row, where, column)
                    present = (name for name, value in row.items() if value is not None)
                    for piece in cut_document([text], unused=unused_columns(present, column)):
                        yield piece, position_on_disk()
                return
            blocks = _whole_text(stream) if file.kind == "optional" else _text_blocks(file.path, stream)
            for piece in cut_document(blocks):
                yield piece, position_on_disk()


def cut_point(text: str, limit: int) -> int:
    """Return where to cut `text`, after at most `limit` characters, so that the two parts have the tokens of the whole.

    The cut is after a single newline, else before a single space: pre-tokenizers (GPT-2's, Llama 3's) never join the
    characters on the two sides of such a cut. Text without either is cut at `limit`.
    """
    at = text.rfind("\n", 1, limit)
    while at > limit // 2:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", 1, at)
    at = text.rfind(" ", 1, limit)
    while at > limit // 2:
        if not text[at - 1].isspace():
            return at
        at = text.rfind(" ", 1, at)
    return limit


def cut_document(
    blocks: Iterable[str], limit: int = PIECE_CHARACTERS, *, unused: tuple[str, ...] | None = None
) -> Iterator[DocumentPiece]:
    """Yield the pieces of one document, whose text comes in blocks; the pieces do not depend on the blocks.

    unused: of the last piece.
    """
    text, is_cut = "", False
    for block in blocks:
        text += block
        while len(text) > limit:
            at = cut_point(text, limit)
            yield DocumentPiece(text[:at], ends_document=False, starts_document=not is_cut)
            text, is_cut = text[at:], True
    if text or is_cut:
        yield DocumentPiece(text, ends_document=True, starts_document=not is_cut, unused=unused)


def _text_blocks(path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    while True:
        block = stream.read(_BLOCK_BYTES)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(path, line + error.object.count(b"\n", 0, error.start), error) from error
        null = text.find("\0")
        if null >= 0:
            number = line + text.count("\n", 0, null)
            raise DataError(
                f"{path}, line {number}: a null character, so the file is not UTF-8 text; "
                "convert the file (iconv -f utf-16 -t utf-8) or leave it out (data.pattern, --pattern)"
            )
        line += text.count("\n")
        yield text
        if not block:
            return


def _whole_text(stream: io.BufferedIOBase) -> Iterator[str]:
    try:
        yield stream.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        return


def unused_columns(names: Iterable[str], text_column: str) -> tuple[str, ...]:
    """Return the columns beside the text."""
    return tuple(name for name in names if name != text_column)


def json_text(row: Any, where: str, text_column: str) -> str:
    """Return the text of the value of a .jsonl line; DataError, with the place `where`, if it has none."""
    if not isinstance(row, dict) or text_column not in row:
        columns = sorted(row) if isinstance(row, dict) else "none: it is not an object"
        raise DataError(
            f"{where}: no column {text_column!r} (columns: {columns}); set data.text_column (--text-column)"
        )
    if not isinstance(row[text_column], str):
        kind = type(row[text_column]).__name__
        raise DataError(
            f"{where}: column {text_column!r} holds {kind}, not text; set another data.text_column (--text-column) "
            "or fix the line"
        )
    refuse_untrained(row, where, TRAINED_COLUMNS)
    return without_surrogates(row[text_column], where)
