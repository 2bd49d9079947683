"""Times forms of one operator against each other: interleaved, in one process, so that a busy machine hurts all alike.

A benchmark of kernels gives `run` its cases and prints nothing of its own:

    CASES = [Case("add + RMSNorm", make_forms, {"eager": 4.0, "compiled": 2.0})]
    if __name__ == "__main__":
        run("kernels-norms", __doc__, CASES)

Each row has the medians of CPU time (all threads) and of wall time of each form, and how many times the fused form's
CPU time the others take, beside what is asked of it.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# As launcher/rank/environment.py does: a thread that spins is counted as CPU time of the form it waits in.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from benchmarks import report
from megalite.launcher.process import keep_freed_memory
from megalite.ops import extension

THREADS, ROUNDS, WARM_UP = 2, 30, 3


@dataclass(frozen=True)
class Case:
    """make() gives the forms by name, "fused" among them: each a function that does the whole work once.

    targets: form -> how many times the fused form's CPU time it should take at least. bytes_moved: what the fused form
    must read and write at least; 0 where that is no measure.
    """

    name: str
    make: Callable[[], Mapping[str, Callable[[], Any]]]
    targets: Mapping[str, float] = field(default_factory=dict)
    bytes_moved: int = 0


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row: milliseconds, and ratios to the fused form."""
    forms = case.make()
    for _ in range(WARM_UP):
        for form in forms.values():
            form()
    cpu: dict[str, list[float]] = {name: [] for name in forms}
    wall: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            started, started_cpu = time.perf_counter(), time.process_time()
            form()
            cpu[name].append(time.process_time() - started_cpu)
            wall[name].append(time.perf_counter() - started)
    row: dict[str, Any] = {"case": case.name}
    for name in forms:
        row[f"{name}, CPU ms"] = round(statistics.median(cpu[name]) * 1e3, 2)
        row[f"{name}, ms"] = round(statistics.median(wall[name]) * 1e3, 2)
    if case.bytes_moved:
        row["moved, MB"] = round(case.bytes_moved / 1e6)
        row["fused, GB/s"] = round(case.bytes_moved / statistics.median(wall["fused"]) / 1e9, 1)
    for name in forms:
        if name != "fused":
            row[f"{name} / fused"] = round(statistics.median(cpu[name]) / statistics.median(cpu["fused"]), 2)
            if name in case.targets:
                row[f"{name} / fused, at least"] = case.targets[name]
    return row


def run(name: str, description: str | None, cases: Sequence[Case]) -> None:
    """The whole program of a benchmark of kernels. A ratio below what is asked is marked, and does not fail."""
    options = report.arguments(description)
    if complaint := extension.why_not("cpu"):
        raise SystemExit(f"no compiled operators here: {complaint}")
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    facts = report.machine() | {"built": extension.built().said}
    rounds = 3 if options.quick else ROUNDS
    rows = [measure(case, rounds) for case in cases]
    columns = {key: key for row in rows for key in row}
    filled = [{key: row.get(key) for key in columns} for row in rows]
    report.show(f"{THREADS} threads, medians of {rounds} interleaved rounds", filled, columns)
    report.write(name, facts, {"threads": THREADS, "rounds": rounds}, rows, options.results)
