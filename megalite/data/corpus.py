"""Reads documents from text, .jsonl, their .gz, parquet, Arrow and Python's standard library, in bounded memory."""

import codecs
import gzip
import hashlib
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.data.tables import column_texts, is_saved_dataset, saved_dataset_files
from megalite.errors import DataError

STANDARD_LIBRARY = "stdlib"

# The size of a piece in characters: the unit of work and of memory; longer documents are cut.
PIECE_CHARACTERS = 1 << 18
_BLOCK_BYTES = 1 << 20
# The magic bytes of files that are not plain text.
_BINARY = {
    b"PAR1": "a parquet file; call it .parquet",
    b"ARROW1": "an Arrow file; call it .arrow",
    b"\x1f\x8b": "a gzip file; call it .gz",
    b"PK\x03\x04": "a zip file; unpack it",
    b"\x28\xb5\x2f\xfd": "a zstandard file; unpack it",
    b"BZh": "a bzip2 file; unpack it",
    b"\xfd7zXZ": "an xz file; unpack it",
    b"%PDF": "a PDF file; extract its text",
    b"MMIDIDX": "the index of a prepared token file; name its prefix as the only source",
}
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Piece:
    """Contiguous text of one document; a document longer than PIECE_CHARACTERS has several pieces."""

    text: str
    ends_document: bool
    starts_document: bool = True


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    kind: "text": one document; "jsonl": one per line; "table" (parquet, Arrow): one per row; "optional": one document,
        skipped if it is not UTF-8.
    """

    path: Path
    kind: Literal["text", "jsonl", "table", "optional"]
    size_bytes: int
    modified_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".gz"


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

    @classmethod
    def open(cls, sources: Sequence[str], *, text_column: str = "text", pattern: str = "*") -> "Corpus":
        """Find the files of all sources; `pattern` selects among the files of a folder, at any depth.

        Raises DataError for a source that does not exist, is a prepared token file, or has no files.
        """
        files = tuple(file for source in sources for file in _files(source, pattern))
        if not files:
            raise DataError("no source given; name a text file, a folder, a .jsonl or stdlib")
        return cls(tuple(sources), files, text_column)

    @property
    def size_bytes(self) -> int:
        """The bytes of all files on disk, compressed files as they are."""
        return sum(file.size_bytes for file in self.files)

    def fingerprint(self) -> str:
        """Return a hash that changes when a file is added, removed, resized or modified, or the text column changes."""
        files = [(str(file.path), file.kind, file.size_bytes, file.modified_ns) for file in self.files]
        return hashlib.blake2b(json.dumps([files, self.text_column]).encode(), digest_size=16).hexdigest()

    def pieces(self, after: Place | None = None) -> Iterator[tuple[Piece, Place]]:
        """Yield the pieces of all documents in order, each with the position after it; start at `after` if given.

        Empty documents are skipped. Raises DataError with file, line and remedy.
        """
        after = after or Place()
        before = sum(file.size_bytes for file in self.files[: after.files])
        for index, file in enumerate(self.files[after.files :], start=after.files):
            skipped = after.pieces if index == after.files else 0
            for count, (piece, position) in enumerate(_read(file, self.text_column), start=1):
                if count > skipped:
                    yield piece, Place(index, count, before + min(position, file.size_bytes))
            before += file.size_bytes


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


def cut_document(blocks: Iterable[str], limit: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """Yield the pieces of one document, whose text comes in blocks; the pieces do not depend on the blocks."""
    text, found = "", False
    for block in blocks:
        text += block
        while len(text) > limit:
            at = cut_point(text, limit)
            yield Piece(text[:at], ends_document=False, starts_document=not found)
            text, found = text[at:], True
    if text or found:
        yield Piece(text, ends_document=True, starts_document=not found)


def _files(source: str, pattern: str) -> Iterator[SourceFile]:
    if source == STANDARD_LIBRARY:
        yield from _standard_library_files()
        return
    path = Path(source).expanduser()
    try:
        if path.is_dir() and is_saved_dataset(path):
            yield from map(_source_file, saved_dataset_files(path.resolve()))
        elif path.is_dir():
            yield from _folder_files(path, pattern)
        elif path.exists():
            yield _source_file(path.resolve())
        elif path.with_name(path.name + ".idx").exists():
            raise DataError(f"{source} is a prepared token file, not text; name the text it was made from")
        else:
            raise DataError(
                f"{source} does not exist; name a text file, a folder, a .jsonl, a .parquet or {STANDARD_LIBRARY!r}"
            )
    except OSError as error:
        raise _cannot_read(Path(error.filename or source), error) from error


def _folder_files(folder: Path, pattern: str) -> Iterator[SourceFile]:
    folder = folder.resolve()
    visible = (
        path for path in folder.rglob(pattern) if not _hidden(path.relative_to(folder)) and path.is_file()
    )
    found = sorted(visible, key=Path.as_posix)
    if not found:
        raise DataError(
            f"{folder} has no file that matches {pattern!r}; set data.pattern (--pattern), for example '*.txt'"
        )
    yield from map(_source_file, found)


def _standard_library_files() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = []
    for folder, below, names in os.walk(root):
        # Changed in place, so that os.walk does not enter installed packages, which are often far larger.
        below[:] = [name for name in below if name not in _NOT_THE_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            f"this Python has no library sources in {root}; name a folder with text instead of stdlib"
        )
    for path in sorted(found, key=Path.as_posix):
        # Optional, because Python's test suite has wrongly encoded files on purpose.
        yield _source_file(path, "optional")


def _source_file(path: Path, kind: Literal["optional"] | None = None) -> SourceFile:
    facts = path.stat()
    name = path.stem if path.suffix == ".gz" else path.name
    by_name: Literal["text", "jsonl", "table"] = "jsonl" if name.endswith(".jsonl") else "text"
    if path.suffix in (".parquet", ".arrow"):
        by_name = "table"
    return SourceFile(path, kind or by_name, facts.st_size, facts.st_mtime_ns)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(file: SourceFile, text_column: str) -> Iterator[tuple[Piece, int]]:
    """Yield the pieces of one file, each with the bytes of the file read so far."""
    if file.kind == "table":
        for text, position in column_texts(file.path, text_column):
            for piece in cut_document([text]):
                yield piece, position
        return
    try:
        with file.path.open("rb") as raw:
            stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if file.compressed else raw
            if not file.compressed:
                _refuse_binary(file.path, raw.peek(8))
            documents: Iterator[Iterable[str]]
            if file.kind == "jsonl":
                documents = _json_lines(file.path, stream, text_column)
            elif file.kind == "optional":
                documents = iter([_whole_text(stream)])
            else:
                documents = iter([_text_blocks(file.path, stream)])
            for blocks in documents:
                for piece in cut_document(blocks):
                    yield piece, raw.tell()
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{file.path} is not a whole gzip file ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise _cannot_read(file.path, error) from error


def _text_blocks(path: Path, stream: io.BufferedIOBase) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    while True:
        block = stream.read(_BLOCK_BYTES)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, line + error.object.count(b"\n", 0, error.start), error) from error
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


def _refuse_binary(path: Path, start: bytes) -> None:
    for mark, what in _BINARY.items():
        if start.startswith(mark):
            raise DataError(f"{path} is {what}, or leave it out (data.pattern, --pattern)")


def _whole_text(stream: io.BufferedIOBase) -> Iterator[str]:
    try:
        yield stream.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        return


def _json_lines(path: Path, stream: io.BufferedIOBase, text_column: str) -> Iterator[tuple[str]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({_reason(error)}); fix or remove the line") from error
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
        yield (_without_surrogates(row[text_column], where),)


def _reason(error: Exception) -> str:
    """Return why a line is not JSON; too many digits and too deep nesting raise other errors than JSONDecodeError."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _without_surrogates(text: str, where: str) -> str:
    # A JSON escape can be half of a surrogate pair, which UTF-8 cannot encode.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half a surrogate pair at character {error.start}; fix or remove the line"
        ) from error
    return text


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}); convert the file (iconv -f latin1 -t utf-8)"
        " or leave it out (data.pattern, --pattern)"
    )


def _cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror or error}); check its permissions and the disk")
