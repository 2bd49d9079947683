"""Rows of instruction data as dicts: .jsonl, .json, parquet, Arrow and saved `datasets` folders."""

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from megalite.data.corpus import json_rows, not_utf8, opened, why_not_json, without_surrogates
from megalite.data.source_files import SourceFile
from megalite.data.tables import table_rows
from megalite.errors import DataError


def records(file: SourceFile) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield each row, its place for messages ("FILE, line 3"), and the bytes of the file read so far.

    A .json file is one list of objects and is read whole. Raises DataError with file, line or row, and remedy.
    """
    if file.kind == "table":
        yield from table_rows(file.path)
        return
    is_json = PurePath(file.path.name.removesuffix(".gz")).suffix == ".json"
    if file.kind != "jsonl" and not is_json:
        raise DataError(
            f"{file.path} holds no conversations: these are read from .jsonl, .json, .parquet and datasets folders; "
            'name such files (data.pattern = "*.jsonl"), or set data.kind = "text" for plain text'
        )
    with opened(file) as (stream, raw):
        rows = _listed(file, stream.read()) if is_json else json_rows(file.path, stream)
        for row, where in rows:
            if not isinstance(row, dict):
                raise DataError(f"{where}: {type(row).__name__}, not an object; fix or remove it")
            without_surrogates(json.dumps(row, ensure_ascii=False), where)
            yield row, where, raw.tell()


def _listed(file: SourceFile, content: bytes) -> Iterator[tuple[Any, str]]:
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise not_utf8(file.path, 1 + content.count(b"\n", 0, error.start), error) from error
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        remedy = "fix the file, or call it .jsonl if every line is an object"
        raise DataError(f"{file.path}{line}: not JSON ({why_not_json(error)}); {remedy}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file.path} is not a list of objects; write a list, or a .jsonl file")
    for number, row in enumerate(rows):
        yield row, f"{file.path}, row {number}"
