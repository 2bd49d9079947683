"""One long sequence in one process: peak resident memory and seconds of a step of the 17M model, measured and planned.

    python -m benchmarks.long_sequence [--quick] [--lengths 8192,32768] [--window N] [--limit 20]

A process a row trains two steps of one sequence in float32: as by default, with full recompute, and with
`sequence_chunk` beside it. `planned GiB` is the planner's peak with what the process held before the step; the last
table solves it for the longest sequence within the limit. Attention takes time by the square of the length, but no
memory; --window bounds it, to measure the memory of lengths that would take hours. The C library gives back freed
pieces of 16 KiB and more, as in benchmarks/memory_prediction.py.
"""

import gc
import multiprocessing
import os
import time
from typing import Any, cast

from benchmarks import report
from benchmarks.memory_configurations import resolved
from megalite.config.sections.schema import RunConfig
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun

GIB = 2**30
STEPS = 2  # the first one has no moments before its update
TINY = {"model.hidden_size": 96, "model.intermediate_size": 96, "training.sequence_length": 256}
CHUNK = 1024
WAYS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "recompute full": {"training.recompute": "full"},
    f"recompute full, sequence_chunk {CHUNK}": {
        "training.recompute": "full",
        "training.sequence_chunk": CHUNK,
    },
}
LONGEST = [*WAYS][-1]
COLUMNS = {name: name for name in ("tokens", "settings", "peak GiB", "planned GiB", "seconds")}


def settings_of(way: str, length: int, window: int | None) -> dict[str, Any]:
    """Return the settings of a run of the 17M model of benchmarks/workload.py on one sequence."""
    attention = {"model.family": "mistral", "model.sliding_window": window} if window else {}
    return {
        "model.hidden_size": 384,
        "model.intermediate_size": 1024,
        "model.num_hidden_layers": 6,
        "model.num_attention_heads": 6,
        "model.vocab_size": 16384,
        "model.tie_word_embeddings": True,
        "model.max_position_embeddings": length,
        "training.sequence_length": length,
        "training.micro_batch_size": 1,
        "training.micro_batches": 1,
        "training.precision": "fp32",
        **attention,
        **WAYS[way],
    }


def planned_bytes(config: RunConfig) -> float:
    """Return the bytes of a step beside those of the process."""
    return largest_rank(PlannedRun.of(config, int(config.model.vocab_size), on_cpu=True)).peak


def longest_within(limit: float, base: float, window: int | None) -> int:
    """Return the longest sequence, in blocks of 1024 tokens, whose planned peak is within `limit` bytes."""
    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        config = resolved(settings_of(LONGEST, 1024 * middle, window))
        low, high = (middle, high) if base + planned_bytes(config) <= limit else (low, middle - 1)
    return 1024 * low


def _step(settings: dict[str, Any]) -> tuple[int, int, float]:
    """Return the resident bytes before the steps, the peak of the process, and the seconds of the last step."""
    from megalite.data.batches.loader import StepLoader
    from megalite.monitor.memory import process_memory
    from megalite.parallel.mesh import ParallelMesh
    from megalite.train.step.part_times import RandomLoader
    from megalite.train.step.train_step import TrainStep

    mesh = ParallelMesh.single()

    def train(config: RunConfig) -> float:
        shape = config.shape(int(config.model.vocab_size))
        trainer = TrainStep(config, mesh, shape, cast(StepLoader, RandomLoader(config, mesh)))
        for _ in range(STEPS):
            started = time.perf_counter()
            trainer.train_step()
        return time.perf_counter() - started

    train(resolved(settings | TINY))  # libraries allocate memory on first use
    gc.collect()
    before = process_memory().now_bytes
    seconds = train(resolved(settings))
    return before, process_memory().peak_bytes, seconds


def measure(way: str, length: int, window: int | None) -> dict[str, Any]:
    """Return the row of one way to train, from a process of its own: a peak never falls."""
    settings = settings_of(way, length, window)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, peak, seconds = pool.apply(_step, (settings,))
    return {
        "tokens": length,
        "settings": way,
        "peak GiB": round(peak / GIB, 2),
        "planned GiB": round((before + planned_bytes(resolved(settings))) / GIB, 2),
        "seconds": round(seconds, 1),
        "before": before,
    }


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--window", type=int)
    parser.add_argument("--limit", type=float, default=20.0, help="GiB")
    options = report.arguments_of(parser)
    # As a run has it: threads that spin share cores badly. The second is read by the processes that start from here.
    os.environ |= {"GOMP_SPINCOUNT": "1000", "MALLOC_MMAP_THRESHOLD_": str(2**14)}
    facts = report.machine()
    lengths = [2048] if options.quick else [int(each) for each in options.lengths.split(",")]
    # Without recompute the longest ones would only show that they do not fit.
    rows = [
        measure(way, length, options.window)
        for length in lengths
        for way in WAYS
        if way == LONGEST or length == lengths[0]
    ]
    base = max(row.pop("before") for row in rows)
    longest = {"longest sequence": longest_within(options.limit * GIB, base, options.window)}
    report.show("one sequence in one process, float32", rows, COLUMNS)
    report.show(
        f"{LONGEST}, planned, within {options.limit:g} GiB", [longest], {name: name for name in longest}
    )
    setting = {"window": options.window, "limit GiB": options.limit, **longest}
    report.write("long-sequence", facts, setting, rows, options.results)


if __name__ == "__main__":
    main()
