"""Predicted and measured peak memory of training on the host, over configurations drawn by a seed.

    python -m benchmarks.memory_prediction [--quick]

Each rank's peak resident memory in three steps, less what is resident once the same settings have trained a tiny
model (everything is imported and connected then), beside the largest rank's peak by planner/memory.py. Nothing of the
prediction was fitted to these configurations. The C library keeps freed pieces below 32 MiB, which no prediction
knows: here it gives back those of 64 KiB and more (MALLOC_MMAP_THRESHOLD_), as an accelerator's allocator reuses them.
"""

import gc
import os
import random
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from benchmarks import report
from benchmarks.ranks import run_ranks
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.monitor.memory import process_memory
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.train.step.train_step import TrainStep

SEED, CASES, STEPS = 32, 12, 3
MIB = 2**20
AXES: dict[str, tuple[Any, ...]] = {
    "model.hidden_size": (256, 384, 512),
    "model.num_hidden_layers": (4, 6, 8),
    "model.num_key_value_heads": (2, 4, 8),
    "model.vocab_size": (2048, 8192, 16384),
    "model.tie_word_embeddings": (True, False),
    "model.chunked_loss": (0, 0, 128),
    "training.sequence_length": (256, 512, 1024),
    "training.micro_batch_size": (1, 2, 4),
    "training.micro_batches": (1, 2, 4),
    "training.precision": ("fp32", "fp32", "bf16"),
    "training.recompute": ("none", "selective", "full"),
    "optimizer.name": ("adamw", "adamw", "lion", "sgd"),
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"parallel.data": 2},
    {"parallel.tensor": 2},
    {"parallel.tensor": 2, "parallel.sequence": True},
    {"parallel.pipeline": 2},
    {"parallel.pipeline": 2, "parallel.schedule": "gpipe"},
)
TINY = {
    "model.hidden_size": 64,
    "model.vocab_size": 128,
    "model.intermediate_size": 64,
    "training.sequence_length": 16,
}


class RandomLoader:
    """Gives this rank's rows of a global batch of random ids."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh):
        self._config, self._mesh = config, mesh

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        plan, length = self._config.batch, self._config.training.sequence_length
        count = plan.global_batch_size // plan.data
        ids = torch.randint(int(self._config.model.vocab_size), (count, length))
        positions = torch.arange(length).repeat(count, 1)
        return StepBatch(
            ids, positions, ids.roll(-1, dims=1), torch.ones(ids.shape, dtype=dtype), torch.arange(count)
        )


def draw(generator: random.Random) -> dict[str, Any]:
    """Return the settings of one configuration."""
    settings = {name: generator.choice(values) for name, values in AXES.items()}
    settings |= generator.choice(LAYOUTS)
    hidden = settings["model.hidden_size"]
    if settings.get("parallel.pipeline", 1) > 1:
        settings["training.micro_batches"] = 4
    return {
        **settings,
        "model.intermediate_size": generator.choice((2, 3)) * hidden,
        "model.num_attention_heads": 8,
        "training.steps": STEPS,
    }


def resolved(settings: dict[str, Any]) -> RunConfig:
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return load_run(None, [*flags, "--data.source", "stdlib"]).config


def peak(config: RunConfig, tiny: RunConfig) -> int:
    """Return the bytes by which this rank's peak resident memory is above what was resident before."""
    _train(tiny)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
    before = process_memory().now_bytes
    _train(config)
    return process_memory().peak_bytes - before


def _train(config: RunConfig) -> None:
    mesh = ParallelMesh.over_world(config.layout, sequence_parallel=config.parallel.sequence)
    shape = config.shape(int(config.model.vocab_size))
    trainer = TrainStep(config, mesh, shape, cast(StepLoader, RandomLoader(config, mesh)))
    for _ in range(STEPS):
        trainer.train_step()


def measure(*, quick: bool) -> list[dict[str, Any]]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # read by the processes that are started from here
    generator, rows = random.Random(SEED), []
    for index in range(3 if quick else CASES):
        settings = draw(generator)
        config = resolved(settings)
        measured = max(run_ranks(peak, config.layout.world_size, config, resolved(settings | TINY)))
        run = PlannedRun.of(config, settings["model.vocab_size"], on_cpu=True)
        predicted = largest_rank(run)
        error = predicted.peak / measured - 1
        row = {"case": index, "layout": config.layout.text, "settings": settings}
        row |= {"measured": measured, "predicted": round(predicted.peak), "error": round(error, 4)}
        rows.append(row | {"kinds": {kind: round(size) for kind, size in predicted.kinds.items()}})
    return rows


def main() -> None:
    arguments = report.arguments(__doc__)
    facts = report.machine()
    rows = measure(quick=arguments.quick)
    errors = [abs(row["error"]) for row in rows]
    shown = [
        {**row, "measured": round(row["measured"] / MIB), "predicted": round(row["predicted"] / MIB)}
        for row in rows
    ]
    report.show(
        "MiB of the largest rank", shown, {key: key for key in ("layout", "measured", "predicted", "error")}
    )
    print(f"error: median {median(errors):.1%}, largest {max(errors):.1%}")
    settings = {"seed": SEED, "unit": "bytes", "median_error": median(errors), "largest_error": max(errors)}
    report.write("memory-prediction", facts, settings, rows, arguments.results)


if __name__ == "__main__":
    main()
