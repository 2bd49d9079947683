"""metrics.jsonl: one JSON object per line and step; each step occurs once, even after kills and resumes."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends records to a file; a record is completely written when `append` returns."""

    def __init__(self, path: Path, *, after_step: int = 0):
        """Continue after step `after_step`: later records, and an incomplete line, are removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # A single truncate, so that a kill never loses a kept record.
            os.truncate(path, _end_of_step(path, after_step))
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
    return [record for record, _ in _records(path)]


def _end_of_step(path: Path, step: int) -> int:
    """Return the offset after the last record of steps up to `step`."""
    end = 0
    for record, record_end in _records(path):
        if record["step"] > step:
            break
        end = record_end
    return end


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each complete record and the offset after it; stop at the first invalid line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(record, dict) or "step" not in record:
                return
            yield record, end
