"""The bubble of each pipeline schedule by its trace: measured, and simulated with the costs that the trace has.

    python -m benchmarks.timeline [--quick]

The stages are those of benchmarks.pipeline_bubble: chunks that sleep. Their steps are traced as `monitor.trace_steps`
does it, and read as `megalite timeline` reads them: no other clock has a part in the table.

simulated   the schedule played with the mean duration of each kind of action in each chunk, transfers free.
measured    the idle share between the first action's start and the last one's end. Medians over several steps.
over        measured - simulated, in points of a percent. worst: of the step where they differ most.
waits       the share of the stages' time in which they wait for messages.
trace us    what a step's trace costs a rank, in microseconds: the stamps of its actions and messages, and its file.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.pipeline_bubble import Case, CaseOnRank, cases_of
from benchmarks.ranks import run_ranks
from megalite.launcher.control.step_trace import TRACES, HostClock, StepTrace, TracedStepFacts
from megalite.monitor.step_tracer import StepTracer
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.timeline import PipelineTimeline, pipeline_timelines
from megalite.planner.traces import read_step
from megalite.topology.axes import Layout

_SPANS = 20_000


def facts_of(case: Case, mesh: ParallelMesh) -> TracedStepFacts:
    return TracedStepFacts(
        step=0,
        rank=mesh.rank,
        world_size=case.stages,
        place=asdict(mesh.at),
        host="here",
        device="cpu",
        schedule=case.schedule,
        stages=case.stages,
        micro_batches=case.micro_batches,
        chunks=case.chunks,
    )


def trace_on_rank(cases: Sequence[Case], steps: int, folder: Path) -> list[float]:
    """Trace the steps of every case in turn below `folder`; return for each case the seconds of writing a trace."""
    mesh = ParallelMesh.over_world(Layout(pipeline=cases[0].stages))
    ranks = [CaseOnRank(case, mesh) for case in cases]
    seconds = [0.0 for _ in cases]
    for step in range(1, steps + 1):
        for number, (case, rank) in enumerate(zip(cases, ranks, strict=True)):
            tracer = StepTracer([step], folder / str(number) / TRACES, facts_of(case, mesh), mesh.device)
            with tracer.step(step):
                rank.step()
                ended = time.perf_counter()
            seconds[number] += (time.perf_counter() - ended) / steps
    return seconds


def span_seconds() -> float:
    """Return the seconds that the two stamps of an action or a message take."""
    trace = StepTrace(HostClock(), "")
    started = time.perf_counter()
    for number in range(_SPANS):
        with trace.span("actions", ("F", 0, number)):
            pass
    return (time.perf_counter() - started) / _SPANS


def row_of(case: Case, run: Path, steps: int, cost_seconds: float) -> dict[str, Any]:
    timelines = [pipeline_timelines(read_step(run, step))[0] for step in range(1, steps + 1)]
    measured = [timeline.measured.bubble for timeline in timelines]
    simulated = [timeline.simulated.bubble for timeline in timelines]
    over = [one - other for one, other in zip(measured, simulated, strict=True)]
    seconds = statistics.median(timeline.measured.length for timeline in timelines)
    return {
        "schedule": case.schedule,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "chunks": case.chunks,
        "chunk_ms": round(case.chunk_unit * 1e3, 1),
        "formula": round(timelines[0].formula, 4),
        "simulated": round(statistics.median(simulated), 4),
        "measured": round(statistics.median(measured), 4),
        "over": round(statistics.median(over), 4),
        "worst": round(max(over, key=abs), 4),
        "waits": round(statistics.median(map(_waiting, timelines)), 4),
        "step_seconds": round(seconds, 4),
        "shortest_over_sleep": round(min(_shortest(case, timeline) for timeline in timelines), 4),
        "trace_us": round(cost_seconds * 1e6),
        "trace_share": round(cost_seconds / seconds, 6),
    }


def _waiting(timeline: PipelineTimeline) -> float:
    waited = sum(stage.waits for stage in timeline.stages)
    return waited / (timeline.measured.length * len(timeline.stages))


def _shortest(case: Case, timeline: PipelineTimeline) -> float:
    """Return the least duration of an action, over the time that it slept."""
    costs = timeline.measured.costs
    return min(
        costs.of(action) / (case.chunk_unit * (2 if action.kind == "B" else 1))
        for _, action in timeline.measured.starts
    )


def measure(*, quick: bool) -> list[dict[str, Any]]:
    chunk_seconds, steps = (0.006, 2) if quick else (0.040, 4)
    worlds = [(2, 4)] if quick else [(4, 8), (8, 16)]
    rows, each_span = [], span_seconds()
    for shape in worlds:
        # A message costs as much whatever a chunk sleeps: all chunks sleep alike.
        cases = [replace(case, unit=chunk_seconds * case.chunks) for case in cases_of(*shape, chunk_seconds)]
        with tempfile.TemporaryDirectory(prefix="megalite-timeline-") as folder:
            ranks = run_ranks(trace_on_rank, shape[0], cases, steps, Path(folder))
            for number, case in enumerate(cases):
                run = Path(folder) / str(number)
                trace = read_step(run).facts
                spans = len(trace.actions) + len(trace.waits) + len(trace.sends)
                cost = spans * each_span + statistics.median(rank[number] for rank in ranks)
                rows.append(row_of(case, run, steps, cost))
    return rows


COLUMNS = {
    "schedule": "schedule",
    "stages": "P",
    "micro_batches": "M",
    "chunks": "v",
    "chunk_ms": "ms/chunk",
    "formula": "formula",
    "simulated": "simulated",
    "measured": "measured",
    "over": "over",
    "worst": "worst",
    "waits": "waits",
    "trace_us": "trace us",
    "trace_share": "of a step",
}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    percent = {key: f"{row[key] * 100:.1f} %" for key in ("formula", "simulated", "measured", "waits")}
    points = {key: f"{row[key] * 100:+.1f}" for key in ("over", "worst")}
    return {**row, **percent, **points, "trace_share": f"{row['trace_share'] * 100:.3f} %"}


def main() -> None:
    arguments = report.arguments(__doc__)
    facts = report.machine()
    rows = measure(quick=arguments.quick)
    report.show("Bubble of a traced step", [_shown(row) for row in rows], COLUMNS)
    report.write("timeline", facts, {"quick": arguments.quick}, rows, arguments.results)


if __name__ == "__main__":
    main()
