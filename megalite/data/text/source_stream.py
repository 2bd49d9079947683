"""Opens source files, plain or gzip, and parses JSON; an error says file, line and remedy."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalite.data.text.source_files import SourceFile, cannot_read
from megalite.errors import DataError

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
_JSON_TYPES = {
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


@contextmanager
def source_stream(file: SourceFile) -> Iterator[tuple[io.BufferedIOBase, Callable[[], int]]]:
    """Open a file that is no table, unpacked, with a function that returns the bytes of it read so far on disk.

    Raises DataError for a file that cannot be read, is not a whole gzip file, or begins as another kind of file.
    """
    try:
        with file.path.open("rb") as raw:
            stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if file.compressed else raw
            if not file.compressed:
                _refuse_binary(file.path, raw.peek(8))
            yield stream, raw.tell
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(
            f"{file.path} is not a whole gzip file ({error}); copy or download it again"
        ) from error
    except OSError as error:
        raise cannot_read(file.path, error) from error


def json_lines(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[Any, str]]:
    """Yield the value of each line with its place for messages, "FILE, line 12"; blank lines are skipped.

    Raises DataError for a line that is not UTF-8 or not JSON.
    """
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield (
                parse_json(line.rstrip(b"\r\n"), path, number, "fix or remove the line"),
                f"{path}, line {number}",
            )


def parse_json(content: bytes, path: Path, line: int, remedy: str) -> Any:
    """Return the value of `content`, which begins at `line` of `path`; DataError if it is not UTF-8 or not JSON."""
    try:
        return json.loads(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(path, line + error.object.count(b"\n", 0, error.start), error) from error
    except (ValueError, RecursionError) as error:
        line += error.lineno - 1 if isinstance(error, json.JSONDecodeError) else 0
        raise DataError(f"{path}, line {line}: not JSON ({json_fault(error)}); {remedy}") from error


def json_fault(error: Exception) -> str:
    """Return why text is not JSON; too many digits and too deep nesting raise other errors than JSONDecodeError."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def json_type(value: object) -> str:
    """Name the type of a JSON value for messages: "text", "a number", "null"."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


def without_surrogates(text: str, where: str) -> str:
    """Return `text`; DataError if a JSON escape in it is half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half a surrogate pair at character {error.start}; fix the text or remove the row"
        ) from error
    return text


def refuse_surrogates(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError, with the field, if any text of a row has half of a surrogate pair, names of fields included."""
    # A list of what is left, because JSON may be nested deeper than Python's calls.
    left: list[tuple[str, Any]] = [("", row)]
    while left:
        field, value = left.pop()
        if isinstance(value, str):
            without_surrogates(value, f"{where}: {field}")
        elif isinstance(value, list):
            left += ((f"{field}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                without_surrogates(key, f"{where}: a name in {field or 'the row'}")
                left.append((f"{field}.{key}".removeprefix("."), item))


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}); convert the file (iconv -f latin1 -t utf-8)"
        " or leave it out (data.pattern, --pattern)"
    )


def _refuse_binary(path: Path, start: bytes) -> None:
    for mark, what in _BINARY.items():
        if start.startswith(mark):
            raise DataError(f"{path} is {what}, or leave it out (data.pattern, --pattern)")
