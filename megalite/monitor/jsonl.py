"""metrics.jsonl: one JSON object a line and a step, each step once, however often the run was killed."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends records to a file; a record is in the file, whole, when `append` returns."""

    def __init__(self, path: Path, *, after_step: int = 0):
        """Go on after step `after_step`: what the file holds of later steps, or of a torn line, is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # One system call: there is no moment at which a kept record is missing.
            os.truncate(path, _end_of_step(path, after_step))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, which has the key "step". Numbers that are not finite become null: JSON has no nan."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a torn line at its end is left out."""
    return [record for record, _ in _records(path)]


def _end_of_step(path: Path, step: int) -> int:
    """The byte after the last record of a step up to `step`."""
    end = 0
    for record, record_end in _records(path):
        if record["step"] > step:
            break
        end = record_end
    return end


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole record and the byte after it; stops at the first line that is none."""
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
