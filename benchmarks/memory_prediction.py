"""Predicted and measured peak memory of training on the host, over configurations drawn by a seed.

    python -m benchmarks.memory_prediction [--quick] [--seed N] [--cases 3,17] [--again FILE]

Each rank's peak resident memory in three steps, less what is resident once the same settings have trained a tiny model
(everything is imported and connected then), beside the largest rank's peak by planner/memory.py. Nothing of the
prediction was fitted to the configurations of SEED; mend it with another seed. The C library keeps freed pieces below
32 MiB, which no prediction knows: here it gives back those of 16 KiB and more (MALLOC_MMAP_THRESHOLD_), as an
accelerator's allocator reuses them. oneDNN keeps nothing of a bf16 product's shape (ONEDNN_PRIMITIVE_CACHE_CAPACITY).
"""

import atexit
import gc
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from benchmarks import report
from benchmarks.memory_configurations import configurations, context_configurations, predicted_peak, resolved
from benchmarks.ranks import PRELOADED, run_ranks
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.monitor.memory import process_memory
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step.options import context_method
from megalite.train.step.part_times import RandomLoader
from megalite.train.step.precision import DTYPES
from megalite.train.step.train_step import TrainStep

SEED, CASES = 2032, 48
STEPS = 3  # DeepSpeed fetches weights ahead from the third forward on
MIB = 2**20
TINY = {
    "model.hidden_size": 64,
    "model.vocab_size": 128,
    "model.intermediate_size": 64,
    "training.sequence_length": 16,
}


def every_configuration(seed: int) -> list[dict[str, Any]]:
    """Return the settings of all configurations of a seed: CASES in one process and several, then those of context."""
    generator = random.Random(seed)
    return [*configurations(generator, CASES), *context_configurations(generator)]


def peak(config: RunConfig, tiny: RunConfig) -> int:
    """Return the bytes by which this rank's peak resident memory is above what was resident before."""
    # One mesh: torch would name the groups of a second one by how many this rank has made, which ranks differ in.
    mesh = ParallelMesh.over_world(
        config.layout, sequence_parallel=config.parallel.sequence, context_method=context_method(config)
    )
    _train(tiny, mesh)
    _multiply(config.training.precision)
    gc.collect()
    _restart_peak()
    before = process_memory().now_bytes
    _train(config, mesh)
    return process_memory().peak_bytes - before


def _restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _multiply(precision: str) -> None:
    """Let the library of matrix products make the work space that it keeps, of some MiB whatever the model."""
    dtype = DTYPES[precision]
    for rows, inner, columns in ((1024, 512, 16384), (1024, 16384, 512), (512, 1024, 16384)):
        torch.ones(rows, inner, dtype=dtype) @ torch.ones(columns, inner, dtype=dtype).t()


def _train(config: RunConfig, mesh: ParallelMesh) -> None:
    frozen = config.adapter.kind != "none"
    if frozen:
        # A run beside frozen weights remembers which they were by their file.
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        (folder / "model.safetensors").write_bytes(bytes(8))
        config = config.model_copy(update={"model": config.model.model_copy(update={"weights": str(folder)})})
    shape = config.shape(int(config.model.vocab_size))
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, RandomLoader(config, mesh)))
    if frozen:
        _restart_peak()  # here the frozen weights are drawn, which takes more memory than to read them
    for _ in range(STEPS):
        trainer.train_step()


def measure(drawn: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each configuration with its number."""
    PRELOADED.append(TrainStep.__module__)
    # Read by the processes that are started from here.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**14), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    for case, settings in drawn:
        config = resolved(settings)
        measured = max(run_ranks(peak, config.layout.world_size, config, resolved(settings | TINY)))
        row = {"case": case, "layout": config.layout.text, "settings": settings, "measured": measured}
        yield predicted(row)


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Return a measured row with what today's model predicts."""
    expected, kinds = predicted_peak(resolved(row["settings"]))
    error = round(expected / row["measured"] - 1, 4)
    kinds_in_bytes = {kind: round(size) for kind, size in kinds.items()}
    return row | {"predicted": round(expected), "error": error, "kinds": kinds_in_bytes}


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--cases", default="", help="numbers of the configurations to run; default: all")
    parser.add_argument(
        "--again", type=Path, help="file of measurements to predict again, and to add --cases to"
    )
    arguments = report.arguments_of(parser)
    facts, seed = report.machine(), arguments.seed
    drawn = list(enumerate(every_configuration(seed)))
    if arguments.cases:
        drawn = [drawn[int(case)] for case in arguments.cases.split(",")]
    rows = []
    if arguments.again:
        kept = json.loads(arguments.again.read_text())
        facts, seed = {name: kept[name] for name in facts}, kept["seed"]
        rows = [predicted(row) for row in kept["rows"]]
        drawn = drawn if arguments.cases else []
    for row in measure(drawn[:3] if arguments.quick else drawn):
        print(f"{row['case']:2} {row['measured']:11,} {row['predicted']:11,} bytes", flush=True)
        rows.append(row)
    rows.sort(key=lambda row: cast(int, row["case"]))
    shown = [
        {**row, "measured": round(row["measured"] / MIB), "predicted": round(row["predicted"] / MIB)}
        for row in rows
    ]
    columns = {key: key for key in ("case", "layout", "measured", "predicted", "error")}
    report.show("MiB of the largest rank", shown, columns)
    errors = [abs(row["error"]) for row in rows]
    print(f"error: median {median(errors):.1%}, largest {max(errors):.1%}")
    settings = {"seed": seed, "unit": "bytes", "median_error": median(errors), "largest_error": max(errors)}
    report.write("memory-prediction", facts, settings, rows, arguments.results)


if __name__ == "__main__":
    main()
