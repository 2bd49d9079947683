"""Reads the rows of instruction data from .jsonl, .json, their .gz, parquet, Arrow and saved `datasets` folders."""

from collections.abc import Iterator
from typing import Any

from megalite.data.text.source_files import SourceFile
from megalite.data.text.source_stream import (
    json_lines,
    json_type,
    parse_json,
    refuse_surrogates,
    source_stream,
)
from megalite.data.text.tables import table_rows
from megalite.errors import DataError


def records(file: SourceFile) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield each row as a dict of its columns, with its place for messages and the bytes of the file read so far.

    The place is "FILE, line 12" in .jsonl, from 1, and "FILE, row 12" elsewhere, from 0 as in `datasets`. Memory is
    bounded for .jsonl and tables; a .json, one list of objects, is read whole. A table has all fields in every struct:
    those without a value are left out; a column without a value is None.

    Raises DataError, with file, row and remedy, for another type of file, a damaged file, and a row that is no object.
    """
    if file.kind == "table":
        for row, number, position in table_rows(file.path):
            columns = {name: _without_absent(value) for name, value in row.items()}
            yield columns, f"{file.path}, row {number}", position
        return
    name = file.path.stem if file.compressed else file.path.name
    if file.kind != "jsonl" and not name.endswith(".json"):
        raise DataError(
            f"{file.path} is not instruction data, which is .jsonl, .json, .parquet or a datasets folder; "
            'leave the file out (data.pattern), or read plain text with data.kind = "text"'
        )
    with source_stream(file) as (stream, position_on_disk):
        rows = json_lines(file.path, stream) if file.kind == "jsonl" else _json_list(file, stream.read())
        for row, where in rows:
            yield _checked(row, where), where, position_on_disk()


def _json_list(file: SourceFile, content: bytes) -> Iterator[tuple[Any, str]]:
    remedy = "fix the file, or call it .jsonl if each line is a row"
    rows = parse_json(content, file.path, 1, remedy)
    if not isinstance(rows, list):
        raise DataError(
            f"{file.path} holds {json_type(rows)}, not a list of rows; write one list of objects, "
            "or call the file .jsonl if each line is a row"
        )
    return ((row, f"{file.path}, row {number}") for number, row in enumerate(rows))


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: the row is {json_type(row)}, not an object; write its columns by name, for example "
            '{"prompt": "...", "completion": "..."}'
        )
    refuse_surrogates(row, where)
    return row


def _without_absent(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_absent(item) for key, item in value.items() if item is not None}
    return [_without_absent(item) for item in value] if isinstance(value, list) else value
