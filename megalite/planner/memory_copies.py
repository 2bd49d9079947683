"""The shared memory that copies of a run's state take (checkpoint.in_memory_every). No torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from megalite.config.output.summary import memory_text
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.errors import Problem
from megalite.planner.planned_run import PlannedRun
from megalite.topology.optimizers import OPTIMIZERS
from megalite.topology.parameters import model_parameters

SHARED_MEMORY = Path("/dev/shm")
_KEPT = 2  # the last whole copy, and the one that is being written
_KEY = "checkpoint.in_memory_every"


def copy_line(config: RunConfig) -> str:
    """Return the equation of the shared memory of all hosts together; "" without copies or a vocabulary."""
    if not config.checkpoint.in_memory_every or (rows := vocabulary(config)) is None:
        return ""
    values, size = _values_and_size(config, rows)
    return (
        f"copies in memory {memory_text(_KEPT * values * size)} = {_KEPT} * {values:,} values * {size} bytes, in "
        f"{SHARED_MEMORY} of all hosts together, on several hosts twice that; each rank keeps one copy of its own"
    )


def copy_problems(config: RunConfig, ranks: int, reclaimed: int = 0) -> Iterator[Problem]:
    """Yield the problem of copies that this host, with `ranks` ranks of the run, cannot keep.

    reclaimed: the bytes of older copies there, which the run removes.
    """
    if not config.checkpoint.in_memory_every:
        return
    every, off = config.checkpoint.in_memory_every, {_KEY: 0}
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        yield Problem(_KEY, f"{every} keeps copies in {SHARED_MEMORY}, which cannot be written", "use 0", off)
        return
    world = config.layout.world_size
    values, size = _values_and_size(config, vocabulary(config) or 1)
    needed = _KEPT * values * size * ranks // world * (1 if ranks == world else 2)
    room = os.statvfs(SHARED_MEMORY)
    if needed > (free := room.f_bavail * room.f_frsize + reclaimed):
        yield Problem(
            _KEY,
            f"{every} keeps copies of {memory_text(needed)} in {SHARED_MEMORY}, where {memory_text(free)} are free",
            "enlarge it (docker --shm-size, mount -o remount,size=), spread the run over more hosts, or use 0",
            off,
        )


def _values_and_size(config: RunConfig, rows: int) -> tuple[int, int]:
    """Return the values that training changes, and the bytes of a checkpoint for each."""
    known = config.in_precision("bf16") if config.training.precision == "auto" else config
    run = PlannedRun.of(known, rows)
    values = sum(each.numel for each in model_parameters(run.shape) if each.trained or each.by_counts)
    exact = (run.weight_bytes < 4 or bool(run.zero_stage)) + len(OPTIMIZERS[config.optimizer.name].state)
    return values, run.weight_bytes + run.exact_bytes * (exact + bool(config.optimizer.ema_decay))
