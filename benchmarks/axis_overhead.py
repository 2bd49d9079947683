"""Cost of each axis and setting on one machine: step time as a ratio to one process that has all its cores.

    python -m benchmarks.axis_overhead [--quick]

The 17M model, a batch of 8 x 256 tokens, two cores. "One process" computes with two threads; every other row splits
the same batch over two ranks of one thread, or does in one process what its name says. Every row is the same work
on the same cores, so a ratio of 1 means that the axis is free; with a pipeline the bubble is part of it, as two
stages of one core each wait for each other. A round measures all rows one after the other in one pair of
processes (built anew, warmed up by one step, then timed), so that a busy machine hurts all alike.

ratio       median over all rounds of the step's time by that of the base in the same round.
of          what the row is compared with: one process, or the same setting without the one that is named.
low, high   the smallest and the largest round.
seconds     median of the steps.
cpu         as ratio, of the processor time of all ranks together: the work without the waiting, so without a bubble,
            and less at the mercy of what else runs (not free of it: threads that wait for each other spin).

With more runnable processes than cores, a row of two threads waits at every operator's end for the later one, and
suffers more than two ranks that meet once a step: see the load in the file before any ratio under 1.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.workload import Setup, Training
from megalite.config.sections.schema import ModelComputeSettings
from megalite.config.sections.training_section import ComputeSettings
from megalite.launcher.process import keep_freed_memory
from megalite.model.options import ModelOptions
from megalite.ops import extension
from megalite.ops.choice import ALL_COMPILED
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES

WORLD = 2
ONE = "one process"
ACCUMULATED = "one process, 8 micro batches"
DATA = "data 2"


@dataclass(frozen=True)
class Contender:
    """A setup, and the name of the one it is compared with."""

    setup: Setup
    base: str = ONE


def _contenders() -> dict[str, Contender]:
    one, data = Setup(sequences=8), Setup(Layout(data=2), sequences=8)
    tensor = Setup(Layout(tensor=2), sequences=8)
    pipeline = Setup(Layout(pipeline=2), micro_batches=8, sequences=8)
    contenders = {
        ONE: Contender(one),
        ACCUMULATED: Contender(replace(one, micro_batches=8)),
        DATA: Contender(data),
        "tensor 2": Contender(tensor),
        "tensor 2, sequence parallel": Contender(replace(tensor, sequence_parallel=True), "tensor 2"),
    }
    for schedule in SCHEDULES:
        contenders[f"pipeline 2, {schedule}"] = Contender(replace(pipeline, schedule=schedule), ACCUMULATED)
    offload = {"offload_optimizer": {"device": "cpu"}}
    for name, zero in {
        "ZeRO 1": {"stage": 1},
        "ZeRO 2": {"stage": 2},
        "ZeRO 3": {"stage": 3},
        "ZeRO 2, optimizer offloaded": {"stage": 2, **offload},
    }.items():
        contenders[f"data 2, {name}"] = Contender(replace(data, zero=zero), DATA)
    options = {
        "recompute selective": ModelOptions(training=ComputeSettings(recompute="selective")),
        "recompute half of the layers": ModelOptions(
            training=ComputeSettings(recompute="full", recompute_ratio=0.5)
        ),
        "recompute full": ModelOptions(training=ComputeSettings(recompute="full")),
        "dropout 0.1 of embedding, residual, mlp": ModelOptions(
            model=ModelComputeSettings(embedding_dropout=0.1, residual_dropout=0.1, mlp_dropout=0.1)
        ),
        "dropout 0.1 of attention": ModelOptions(model=ModelComputeSettings(attention_dropout=0.1)),
        "label smoothing, z-loss": ModelOptions(training=ComputeSettings(label_smoothing=0.1, z_loss=1e-4)),
        "bf16": ModelOptions(dtype=torch.bfloat16),
    }
    if extension.available("cpu"):
        options["compiled operators"] = ModelOptions(operators=ALL_COMPILED)
    for name, option in options.items():
        contenders[name] = Contender(replace(one, options=option))
    for tokens in (200, 50):
        contenders[f"documents of {tokens} tokens"] = Contender(replace(one, document_tokens=tokens))
    return contenders


CONTENDERS = _contenders()
QUICK = (ONE, ACCUMULATED, DATA, "pipeline 2, zbv", "data 2, ZeRO 1")


@dataclass(frozen=True)
class Times:
    """Medians of a round's steps: by the clock, and of all ranks' processors."""

    seconds: float
    cpu_seconds: float


def time_on_rank(names: Sequence[str], steps: int) -> dict[str, Times | None]:
    """Times of every contender in one round, on this rank of the current process group."""
    keep_freed_memory()
    world = ParallelMesh.over_world(Layout(data=WORLD))
    return {name: _times(CONTENDERS[name].setup, world, steps) for name in names}


def _times(setup: Setup, world: ParallelMesh, steps: int) -> Times | None:
    """None on a rank that the setup does not need."""
    alone = setup.layout.world_size == 1
    torch.set_num_threads(WORLD if alone else 1)
    times = None
    if world.rank < setup.layout.world_size:
        times = _steps(setup, ParallelMesh.single() if alone else setup.mesh(), steps)
    gc.collect()
    world.barrier()  # who is not needed waits here, without a core
    return times


def _steps(setup: Setup, mesh: ParallelMesh, steps: int) -> Times:
    training = Training(setup, mesh)
    training.step()
    seconds, cpu_seconds = [], []
    for _ in range(steps):
        mesh.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        training.step()
        mesh.barrier()
        seconds.append(time.perf_counter() - started)
        cpu_seconds += mesh.sum_over_world([time.process_time() - cpu_started])
    return Times(statistics.median(seconds), statistics.median(cpu_seconds))


def rows_of(rounds: Sequence[Mapping[str, Times]]) -> list[dict[str, Any]]:
    rows = []
    for name in rounds[0]:
        base = CONTENDERS[name].base
        ratios = [each[name].seconds / each[base].seconds for each in rounds]
        cpu_ratios = [each[name].cpu_seconds / each[base].cpu_seconds for each in rounds]
        rows.append(
            {
                "case": name,
                "of": base,
                "ratio": round(statistics.median(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
                "cpu": round(statistics.median(cpu_ratios), 3),
                "seconds": round(statistics.median(each[name].seconds for each in rounds), 3),
                "cpu_seconds": round(statistics.median(each[name].cpu_seconds for each in rounds), 3),
            }
        )
    return rows


def measure(*, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows after each round."""
    names, steps = (QUICK, 1) if quick else (tuple(CONTENDERS), 2)
    rounds = []
    for _ in range(1 if quick else 5):
        rounds.append(run_ranks(time_on_rank, WORLD, names, steps)[0])
        yield rows_of(rounds)


def main() -> None:
    arguments = report.arguments(__doc__)
    facts = report.machine()
    columns = {key: key for key in ("case", "ratio", "of", "low", "high", "cpu", "seconds")}
    for number, rows in enumerate(measure(quick=arguments.quick), start=1):
        report.show(f"Step time of each axis, {number} rounds", rows, columns)
        settings = {"quick": arguments.quick, "rounds": number}
        report.write("axis-overhead", facts, settings, rows, arguments.results)


if __name__ == "__main__":
    main()
