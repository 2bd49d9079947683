"""Runs the pairwise table: every row of tests/parity/matrix.csv against one process.

    python -m tests.parity.run_matrix                       the whole table; minutes
    python -m tests.parity.run_matrix --row 17 --row 40     these rows alone, with every error
    python -m tests.parity.run_matrix --only schedule=zbv --only zero=1
    python -m tests.parity.run_matrix --write               makes the table anew from the axes and the rules

Prints the worst error of each value of each axis and the rows that fail, and writes both into benchmarks/results/
after the whole table. Exit code 1 where a row fails.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from tests.support.matrix.axes import AXES, Row
from tests.support.matrix.rows import flags_of, ranks_of, settings_of
from tests.support.matrix.table import TABLE, as_text, made_anew, part_for_every_change, read_table
from tests.support.matrix.train import Matrix
from tests.support.ranks import RankPool

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CORES_A_JOB = 4


@dataclass(frozen=True)
class Result:
    """The result of a row: its errors, or why it has none."""

    row: int
    values: Row
    errors: Mapping[str, float]
    allowed: Mapping[str, float]
    problems: list[str]
    seconds: float

    @property
    def kind(self) -> str:
        """Rows with errors of one order of magnitude."""
        zero = " ZeRO" if self.values["zero"] != "0" and self.values["precision"] == "fp64" else ""
        return self.values["precision"] + zero


KINDS = ("fp64", "fp64 ZeRO", "fp32", "bf16", "fp16")
_matrix: Matrix


def _start_job() -> None:
    """In a job's process: what its ranks print (DeepSpeed's warnings) would tear the progress bar."""
    global _matrix
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    _matrix = Matrix(RankPool())


def _run_row(number: int, row: Row) -> Result:
    began = time.perf_counter()
    try:
        outcome = _matrix.run(row)
        errors, allowed, problems = outcome.errors, outcome.allowed, outcome.problems
    except Exception as error:  # whatever it is: the other rows are still to be run
        errors, allowed, problems = {}, {}, [f"{type(error).__name__}: {error}"]
    return Result(number, row, errors, allowed, problems, round(time.perf_counter() - began, 2))


def run_rows(rows: Mapping[int, Row], jobs: int) -> list[Result]:
    """Each job is a process with a pool of ranks of its own."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_job) as executor:
        running = [executor.submit(_run_row, number, row) for number, row in rows.items()]
        results = []
        for each in tqdm(running, unit="row", disable=len(rows) < 4):
            results.append(each.result())
            for problem in results[-1].problems:
                tqdm.write(f"row {results[-1].row}: {problem.splitlines()[0]}")
        return results


def worst_by_value(results: Sequence[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Axis -> value -> kind of row -> the largest error of any quantity."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for axis in AXES:
        for result in results:
            kinds = found.setdefault(axis, {}).setdefault(result.values[axis], {})
            for error in result.errors.values():
                kinds[result.kind] = max(kinds.get(result.kind, 0.0), error)
    return found


def report(results: Sequence[Result]) -> Iterator[str]:
    yield f"{'worst relative error':41}{'rows':>5}" + "".join(f"{kind:>11}" for kind in KINDS)
    for axis, values in worst_by_value(results).items():
        for value, kinds in values.items():
            count = sum(result.values[axis] == value for result in results)
            cells = (f"{kinds[kind]:.1e}" if kind in kinds else "" for kind in KINDS)
            yield f"{axis:17}{value:24}{count:5}" + "".join(f"{cell:>11}" for cell in cells)
    closest = max(
        (
            (result.errors[what] / result.allowed[what], what, result.row)
            for result in results
            for what in result.errors
        ),
        default=None,
    )
    if closest is not None:
        yield f"nearest to its bound: {closest[1]} of row {closest[2]}, {closest[0]:.0%} of it"
    for result in results:
        for problem in result.problems:
            yield f"\nrow {result.row} FAILS: {problem}"
        if result.problems:
            yield f"  {', '.join(f'{axis} {value}' for axis, value in result.values.items())}"
            yield f"  alone: python -m tests.parity.run_matrix --row {result.row}"


def write_results(results: Sequence[Result], jobs: int, seconds: float) -> Path:
    path = RESULTS / f"{date.today().isoformat()}-parity-matrix.json"
    content = {
        "date": date.today().isoformat(),
        "command": "python -m tests.parity.run_matrix",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "jobs": jobs,
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "deepspeed")},
        "seconds": round(seconds, 1),
        "failed_rows": [result.row for result in results if result.problems],
        "worst": worst_by_value(results),
    }
    rows = ",\n".join(f"    {json.dumps(asdict(result))}" for result in results)
    text = json.dumps(content, indent=2).removesuffix("\n}")
    path.write_text(f'{text},\n  "rows": [\n{rows}\n  ]\n}}\n')
    return path


def chosen(rows: Sequence[Row], arguments: argparse.Namespace) -> dict[int, Row]:
    numbered = dict(enumerate(rows, start=1))
    if arguments.part:
        numbered = {index + 1: rows[index] for index in part_for_every_change(rows)}
    wanted = [tuple(each.split("=", 1)) for each in arguments.only]
    return {
        number: row
        for number, row in numbered.items()
        if (not arguments.row or number in arguments.row)
        and all(row[axis] == value for axis, value in wanted)
    }


def write_table() -> Iterator[str]:
    covering = made_anew()
    TABLE.write_text(as_text(covering.rows))
    for pair, reason in covering.impossible.items():
        yield f"never together: {' and '.join(' '.join(cell) for cell in sorted(pair))}: {reason}"
    yield f"{len(covering.rows)} rows in {TABLE}"


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run_matrix"
    )
    jobs = max(1, (os.cpu_count() or 1) // CORES_A_JOB)
    parser.add_argument("--row", type=int, action="append", default=[], metavar="N", help="only this row")
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE", help="only rows with it")
    parser.add_argument("--part", action="store_true", help="only the rows that every change runs")
    parser.add_argument("--jobs", type=int, default=jobs, help=f"rows at once (here {jobs})")
    parser.add_argument("--write", action="store_true", help="make the table anew and run nothing")
    arguments = parser.parse_args()
    if arguments.write:
        _say(write_table())
        return 0
    rows = chosen(read_table(), arguments)
    if not rows:
        parser.error("no row is like that")
    began = time.perf_counter()
    results = run_rows(rows, min(arguments.jobs, len(rows)))
    seconds = time.perf_counter() - began
    if len(arguments.row):
        for result in results:
            print(f"row {result.row}, {ranks_of(settings_of(result.values))} ranks: megalite train", end=" ")
            print(*flags_of(settings_of(result.values)))
            _say(
                f"  {what}: {error:.2e} of {result.allowed[what]:.0e}"
                for what, error in result.errors.items()
            )
    _say(report(results))
    print(f"{len(results)} rows in {seconds:.0f} s, {sum(bool(each.problems) for each in results)} fail")
    if len(rows) == len(read_table()):
        print(f"written to {write_results(results, arguments.jobs, seconds)}")
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
