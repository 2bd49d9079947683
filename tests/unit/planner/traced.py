"""Fabricated traces of a step: what each rank would write if a schedule ran with given costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megalite.launcher.control.progress import Activity
from megalite.launcher.control.step_trace import TRACES, RankTrace, TracedPhase, TracedSpan
from megalite.topology.axes import Layout
from megalite.topology.schedule_timeline import Costs, Timeline, orders_of, play
from megalite.topology.schedules import SCHEDULES, Action
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import ScheduledAction, stage_programs

STEP, STARTED_AT = 7, 1_800_000_000.0
TOTALS_SECONDS = 0.5


def played(schedule: str, stages: int, micro_batches: int, chunks: int, costs: Costs) -> list[RankTrace]:
    """Return the traces of a step of one rank a stage that runs exactly as `play` says."""
    timeline = play(orders_of(schedule, stages, micro_batches, chunks), costs)
    spans = [
        {
            action: (start, timeline.ends(at, action))
            for (at, action), start in timeline.starts.items()
            if at == stage
        }
        for stage in range(stages)
    ]
    return [
        rank_trace(
            schedule,
            (stages, micro_batches, chunks),
            stage,
            actions,
            waits_in(timeline, stage, chunks, schedule),
        )
        for stage, actions in enumerate(spans)
    ]


def waits_in(timeline: Timeline, stage: int, chunks: int, schedule: str) -> list[TracedSpan]:
    """Return a wait for each message of another stage: from the action before it to the one that needs it."""
    orders: list[list[Action]] = [[] for _ in range(timeline.stages)]
    for (at, action), _ in sorted(timeline.starts.items(), key=lambda placed: placed[1]):
        orders[at].append(action)
    layers = tuple(range(chunk, chunk + 1) for chunk in range(timeline.stages * chunks))
    split = PipelineSplit(layers, timeline.stages, SCHEDULES[schedule].v_shaped)
    waits, free_at = [], 0.0
    for step in stage_programs(orders, split)[stage]:
        if isinstance(step, ScheduledAction):
            start = timeline.starts[stage, step.action]
            if step.needs is not None and split.stage_of(step.needs.made_in) != stage:
                waits.append(TracedSpan(*step.needs, free_at, start))
            free_at = timeline.ends(stage, step.action)
    return waits


def rank_trace(
    schedule: str,
    sizes: tuple[int, int, int],
    stage: int,
    actions: Mapping[Action, tuple[float, float]],
    waits: Sequence[TracedSpan] = (),
) -> RankTrace:
    """Return the trace of the only rank of a stage. sizes: stages, micro batches, chunks of a stage."""
    stages, micro_batches, chunks = sizes
    end = max(end for _, end in actions.values())
    return RankTrace(
        step=STEP,
        rank=stage,
        world_size=stages,
        place=asdict(Layout(pipeline=stages).coordinates(stage)),
        host="a",
        device="cpu",
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        started_at=STARTED_AT,
        phases=[
            TracedPhase(Activity.FORWARD_BACKWARD.value, 0.0, end),
            # All ranks leave the collective of the totals together.
            TracedPhase(Activity.TOTALLING.value, end, 1000.0),
            TracedPhase(Activity.UPDATING.value, 1000.0, 1000.25),
        ],
        actions=[TracedSpan(*action, *times) for action, times in actions.items()],
        waits=waits,
        sends=[],
    )


def write_run(folder: Path, ranks: Sequence[RankTrace]) -> Path:
    """Write the traces below a run folder, and return the folder."""
    for rank in ranks:
        rank.write(folder / TRACES)
    return folder
