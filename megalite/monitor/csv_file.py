"""metrics.csv: the records as a table, one row per record and step, even after kills and resumes."""

import csv
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from megalite.monitor.sink import ReportedRun, Sink


class CsvFile(Sink):
    """Appends rows to a file; a record with a new key rewrites it with one column more, empty in the rows before."""

    def __init__(self, run: ReportedRun):
        """Continue after the run's step: later rows, and an incomplete one, are removed."""
        self._path = Path(run.monitor.csv_folder or run.folder) / "metrics.csv"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] = []
        if run.monitor.csv_folder and run.after_step < 0:
            self._keep_another_runs()
        rows = self._rows() if self._path.exists() else []
        self._rewrite(row for row in rows if int(row["step"]) <= run.after_step)

    @property
    def place(self) -> Path:
        return self._path

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a row; it is complete when the call returns."""
        if added := [key for key in record if key not in self._columns]:
            rows = self._rows() if self._columns else []
            self._columns += added
            self._rewrite(rows)
        self._writer.writerow(record)
        self._file.flush()

    def close(self, exit_code: int) -> None:
        self._file.close()

    def _keep_another_runs(self) -> None:
        """Rename the table that an earlier run left in a folder that is not the run's own."""
        if self._path.exists():
            names = (self._path.with_name(f"metrics-{number}.csv") for number in count(1))
            self._path.rename(next(path for path in names if not path.exists()))

    def _rows(self) -> list[dict[str, Any]]:
        """Read the columns, and return the rows; a last one without its end may have a number that is cut off."""
        with self._path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(line for line in file if line.endswith("\n"))
            rows = list(reader)
            self._columns = list(reader.fieldnames or [])
        return rows

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        partial = self._path.with_name("metrics.csv.partial")
        self._file = partial.open("w", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self._columns)
        if self._columns:
            self._writer.writeheader()
        self._writer.writerows(rows)
        self._file.flush()
        partial.replace(self._path)  # the open file goes on under the new name
