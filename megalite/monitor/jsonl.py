"""metrics.jsonl: one JSON object per line and step; each step occurs once, even after kills and resumes."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK = 1 << 16


class MetricsFile:
    """Appends records to a file; a record is completely written when `append` returns."""

    def __init__(self, path: Path, *, after_step: int = 0):
        """Continue after step `after_step`: later records, and an incomplete line, are removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # A single truncate, so that a kill never loses a kept record.
            os.truncate(path, end_of_step(path, after_step))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record with the key "step"; inf and nan become null, because JSON has no such numbers."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file in order, without an incomplete last line."""
    with path.open("rb") as file:
        records = map(_record_of, file)
        return [record for record in records if record is not None]


def newest_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records from the last to the first; reads no more of the file than is asked for."""
    return (record for record, _ in _backwards(path))


def end_of_step(path: Path, step: int) -> int:
    """Return the offset after the last record of steps up to `step`."""
    return next((end for record, end in _backwards(path) if record["step"] <= step), 0)


def _backwards(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each complete record and the offset after it, the last one first."""
    with path.open("rb") as file:
        for line, end in _lines_backwards(file):
            record = _record_of(line)
            if record is not None:
                yield record, end


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line and the offset after it, the last one first."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start > 0:
        size = min(_BLOCK, start)
        start -= size
        file.seek(start)
        rest = file.read(size) + rest
        # The first line of a block may begin in the block before.
        begin = rest.find(b"\n") + 1 if start else 0
        end = start + len(rest)
        while len(rest) > begin:
            line_begin = max(begin, rest.rfind(b"\n", begin, len(rest) - 1) + 1)
            line, rest = rest[line_begin:], rest[:line_begin]
            yield line, end
            end -= len(line)


def _record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None for a line that is not whole, or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
