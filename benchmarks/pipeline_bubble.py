"""The bubble of each pipeline schedule: measured, with stages that sleep, beside the ideal one.

    python -m benchmarks.pipeline_bubble [--quick]

A chunk's forward and the gradients of its input and its weights each sleep a fixed time, so that two cores host eight
ranks; everything else is what trains a model: parallel/pipeline.py, parallel/schedule.py, gloo's transfers (of a few
bytes). A stage's forward sleeps as long whatever the number of its chunks, so that all
rows of one (stages, micro batches) do the same work; the row of interleaved_1f1b with twice the milliseconds a chunk
shows that the runner's cost is one of each action.

bubble      the share of all ranks' time in a step in which they do not sleep their calibrated time: waiting for
            others, and everything that the runner and torch cost. Median of several rounds over all rows, one of
            warm-up before; fastest: of the fastest step, which other work on the machine has hurt least.
ideal       of topology.schedule_timeline, transfers and runner free: F = I = W, B = I + W.
over        fastest - ideal, in points of a percent: what the runner costs (and a machine busy all the time).
ms/action   the same in time: what the step takes longer, for each F, B, I or W of a rank. It hardly depends on how
            long a chunk works, so a real model's `over` follows from it.
in flight   the most (chunk, micro batch) pairs whose activations any rank held at once: measured / by the data.
            In stages' worth: divided by the chunks a stage.
"""

import ctypes
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.ranks import run_ranks
from megalite.parallel.gradient_sums import now_or_later
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineRunner, PipelineShapes, weight_share
from megalite.parallel.step_batch import ForwardMode, StepBatch
from megalite.topology.axes import Layout
from megalite.topology.schedule_timeline import (
    ideal_timeline,
    in_flight_chunks,
    orders_of,
)
from megalite.topology.schedules import SCHEDULES
from megalite.topology.stages import PipelineSplit

HIDDEN, TOKENS = 4, 2
# A sleep takes up to so much longer than it is asked for, with the least timer slack.
OVERSLEPT_SECONDS = 0.00015
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Case:
    """One schedule on so many stages. unit: the seconds of a stage's forward, as of its I and of its W."""

    schedule: str
    stages: int
    micro_batches: int
    chunks: int
    unit: float

    @property
    def chunk_unit(self) -> float:
        return self.unit / self.chunks


@dataclass(frozen=True)
class RankFigures:
    """The results of one rank for a case. seconds: of each timed step; busy: calibrated sleep in one step."""

    seconds: tuple[float, ...]
    busy: float
    in_flight: int


class Sleeper:
    """Sleeps on behalf of a rank's chunks; keeps the account."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.alive = self.in_flight = 0
        # Waiting awake for the end of a sleep takes the core that other ranks' transfers need.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def sleep(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        time.sleep(max(0.0, seconds - OVERSLEPT_SECONDS))
        while time.perf_counter() < end:
            pass
        self.busy += seconds

    def begin(self) -> None:
        self.alive += 1
        self.in_flight = max(self.in_flight, self.alive)

    def end(self) -> None:
        self.alive -= 1


class _Sleep(torch.autograd.Function):
    """Sleeps in backward: for the gradient of the inputs, and for that of the weights when the schedule wants it."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, sleeper: Sleeper, seconds: float) -> Tensor:
        ctx.sleeper, ctx.seconds = sleeper, seconds
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sleeper, seconds = ctx.sleeper, ctx.seconds

        def weights() -> None:
            sleeper.sleep(seconds)
            sleeper.end()

        sleeper.sleep(seconds)
        now_or_later(weights)
        return grad, None, None


class SleepingChunk(nn.Module):
    """A chunk for the runner whose F, I and W take `seconds` each, and B twice as long."""

    def __init__(self, index: int, chunks: int, sleeper: Sleeper, seconds: float):
        super().__init__()
        self.is_first, self.is_last = index == 0, index == chunks - 1
        self.weight = nn.Parameter(torch.zeros(HIDDEN))
        self._sleeper, self._seconds = sleeper, seconds

    def forward(self, inputs: Tensor, *, batch: StepBatch, mode: ForwardMode) -> Tensor:
        """Ids [B, S] or hidden states [B, S, H] -> hidden states; the last one: losses [B]."""
        self._sleeper.begin()
        self._sleeper.sleep(self._seconds)
        if self.is_first:
            inputs = inputs.new_zeros((*inputs.shape, HIDDEN), dtype=torch.float32)
        outputs = _Sleep.apply(inputs + self.weight, self._sleeper, self._seconds)
        return outputs.sum(dim=(1, 2)) if self.is_last else outputs


class CaseOnRank:
    """A case's chunks of one rank, and what their steps took."""

    def __init__(self, case: Case, mesh: ParallelMesh):
        chunks = case.stages * case.chunks
        split = PipelineSplit(
            tuple(range(chunk, chunk + 1) for chunk in range(chunks)),
            case.stages,
            SCHEDULES[case.schedule].v_shaped,
        )
        self._mesh, self._sleeper = mesh, Sleeper()
        held = [
            SleepingChunk(index, chunks, self._sleeper, case.chunk_unit)
            for index in split.chunks_of(mesh.at.pp)
        ]
        shapes = PipelineShapes(case.micro_batches, HIDDEN, torch.float32, case.schedule)
        self._runner = PipelineRunner(held, split, mesh, shapes)
        ids = torch.zeros(case.micro_batches, TOKENS, dtype=torch.int64)
        self._batch = StepBatch(ids, ids, ids, torch.ones(ids.shape), torch.arange(case.micro_batches))
        self._weight = mesh.reduce_over_world(weight_share(self._batch, mesh))
        self._runner.forward_backward(self._batch, self._weight)
        self._sleeper.busy = 0.0
        self._seconds: list[float] = []

    def step(self) -> None:
        self._mesh.barrier()
        started = time.perf_counter()
        # The sum over all ranks ends the step on all of them together.
        self._mesh.reduce_over_world(self._runner.forward_backward(self._batch, self._weight))
        self._seconds.append(time.perf_counter() - started)

    def figures(self) -> RankFigures:
        busy = self._sleeper.busy / len(self._seconds)
        return RankFigures(tuple(self._seconds), busy, self._sleeper.in_flight)


def measure_on_rank(cases: Sequence[Case], rounds: int) -> list[RankFigures]:
    """A step of every case in turn, round after round, on this rank of the current process group."""
    mesh = ParallelMesh.over_world(Layout(pipeline=cases[0].stages))
    held = [CaseOnRank(case, mesh) for case in cases]
    for _ in range(rounds):
        for case in held:
            case.step()
    return [case.figures() for case in held]


def row_of(case: Case, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    shape = (case.schedule, case.stages, case.micro_batches, case.chunks)
    steps = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
    busy = sum(rank.busy for rank in ranks) / case.stages
    measured, fastest = 1 - busy / statistics.median(steps), 1 - busy / min(steps)
    ideal = ideal_timeline(*shape).bubble
    length = ideal_timeline(*shape).length * case.chunk_unit
    actions = max(len(order) for order in orders_of(*shape))
    return {
        "schedule": case.schedule,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "chunks": case.chunks,
        "chunk_ms": round(case.chunk_unit * 1e3, 1),
        "ideal_bubble": round(ideal, 4),
        "measured_bubble": round(measured, 4),
        "fastest_bubble": round(fastest, 4),
        "over": round(fastest - ideal, 4),
        "step_seconds": round(statistics.median(steps), 4),
        "fastest_step_seconds": round(min(steps), 4),
        "ideal_step_seconds": round(length, 4),
        "over_ms_an_action": round((min(steps) - length) / actions * 1e3, 3),
        "busy_seconds": [round(rank.busy, 4) for rank in ranks],
        "in_flight": max(rank.in_flight for rank in ranks),
        "in_flight_by_data": max(in_flight_chunks(order) for order in orders_of(*shape)),
    }


def cases_of(stages: int, micro_batches: int, unit: float) -> list[Case]:
    """Every schedule with its usual number of chunks, and those that take any with others."""
    chunks = {name: [schedule.default_chunks] for name, schedule in SCHEDULES.items()}
    chunks["interleaved_1f1b"] += [4]
    chunks["interleaved_zero_bubble"] = [1, 2]
    return [
        Case(name, stages, micro_batches, count, unit)
        for name, counts in chunks.items()
        for count in counts
        if SCHEDULES[name].problem(stages, micro_batches, count) is None
    ]


def measure(*, quick: bool) -> list[dict[str, Any]]:
    unit, rounds = (0.012, 2) if quick else (0.040, 4)
    worlds = [[(2, 4)]] if quick else [[(4, 8), (4, 16)], [(8, 16)]]
    rows = []
    for shapes in worlds:
        cases = [case for shape in shapes for case in cases_of(*shape, unit)]
        cases += [Case("interleaved_1f1b", *shape, 4, 2 * unit) for shape in shapes]
        ranks = run_ranks(measure_on_rank, cases[0].stages, cases, rounds)
        rows += [row_of(case, figures) for case, *figures in zip(cases, *ranks, strict=True)]
    return rows


COLUMNS = {
    "schedule": "schedule",
    "stages": "P",
    "micro_batches": "M",
    "chunks": "v",
    "chunk_ms": "ms/chunk",
    "ideal": "ideal",
    "measured": "measured",
    "fastest": "fastest",
    "over": "over",
    "over_ms_an_action": "ms/action",
    "in_flight": "in flight",
}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    percent = {key: f"{row[f'{key}_bubble'] * 100:.1f} %" for key in ("ideal", "measured", "fastest")}
    in_flight = f"{row['in_flight']} / {row['in_flight_by_data']}"
    return {**row, **percent, "over": f"{row['over'] * 100:+.1f}", "in_flight": in_flight}


def main() -> None:
    arguments = report.arguments(__doc__)
    facts = report.machine()
    rows = measure(quick=arguments.quick)
    report.show("Bubble of a step", [_shown(row) for row in rows], COLUMNS)
    report.write("pipeline-bubble", facts, {"quick": arguments.quick}, rows, arguments.results)


if __name__ == "__main__":
    main()
