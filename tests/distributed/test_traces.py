"""A traced step has each action of its schedule, in its order, and a wait for each message of another stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pipeline_bubble import Case, cases_of
from benchmarks.timeline import trace_on_rank
from megalite.planner.timeline import pipeline_timelines
from megalite.planner.traces import TracedStep, read_step
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.schedules import Action
from megalite.topology.transfers import Message, ScheduledAction, stage_programs
from tests.support.selection import cases

SLEEP, STEPS = 0.002, 2
CASES = cases_of(2, 4, SLEEP)


def messages_of(step: TracedStep, stage: int) -> list[Message]:
    """Return the messages of other stages that a stage of the schedule waits for, in their order."""
    facts, split = step.facts, step.split
    orders = orders_of(facts.schedule, facts.stages, facts.micro_batches, facts.chunks)
    program = stage_programs(orders, split)[stage]
    needed = [each.needs for each in program if isinstance(each, ScheduledAction) and each.needs]
    return [message for message in needed if split.stage_of(message.made_in) != stage]


def check(case: Case, step: TracedStep) -> None:
    """The trace is that of the case's schedule, and its chunks slept."""
    orders = orders_of(case.schedule, case.stages, case.micro_batches, case.chunks)
    for stage, rank in enumerate(step.ranks):
        assert [Action(*span[:3]) for span in rank.actions] == [*orders[stage]]
        assert [Message(*span[:3]) for span in rank.waits] == messages_of(step, stage)  # type: ignore[arg-type]
        for span in rank.actions:
            slept = case.chunk_unit * (2 if span.kind == "B" else 1)
            assert span.end - span.start >= 0.999 * slept, span
        # One thing at a time, and nothing ends before it starts.
        spans = sorted([*rank.actions, *rank.waits], key=lambda span: (span.start, span.end))
        assert all(span.start <= span.end for span in spans)
        assert all(one.end <= other.start for one, other in pairwise(spans))
    [timeline] = pipeline_timelines(step)
    for wait in timeline.waits:
        # The clocks of one host agree: no message was there before it was made.
        assert wait.end >= timeline.measured.ends(wait.source, wait.made_by)
    assert 0 < timeline.simulated.bubble < timeline.measured.bubble < 1


@pytest.mark.parametrize(
    "number", cases(range(len(CASES)), core=[1]), ids=[f"{case.schedule}-{case.chunks}" for case in CASES]
)
def test_a_trace_is_that_of_its_schedule(ranks, tmp_path: Path, number: int) -> None:
    case = CASES[number]
    ranks.run(trace_on_rank, world_size=2, cases=[case], steps=STEPS, folder=tmp_path)
    for step in range(1, STEPS + 1):
        check(case, read_step(tmp_path / "0", step))


def trace_held(cases: list[Case], folder: Path) -> None:
    """Trace a step in which stage 1 holds its backward of micro batch 1 until stage 0 waits for it."""
    import torch.distributed as dist

    from megalite.launcher.control.progress import progress

    span, let_go = progress.span, folder / "let-go"

    @contextmanager
    def held(kind, of) -> Iterator[None]:
        if kind == "waits" and of == Message("B", 0, 1):
            let_go.touch()
        with span(kind, of):
            while (dist.get_rank(), kind, of) == (1, "actions", Action("B", 1, 1)) and not let_go.exists():
                time.sleep(0.001)
            yield

    progress.span = held  # type: ignore[method-assign]
    try:
        trace_on_rank(cases, 1, folder)
    finally:
        del progress.span


def test_who_holds_a_stage_is_named(ranks, tmp_path: Path) -> None:
    case = Case("1f1b", 2, 4, 1, SLEEP)
    ranks.run(trace_held, world_size=2, cases=[case], folder=tmp_path)
    [timeline] = pipeline_timelines(read_step(tmp_path / "0"))
    [wait] = [wait for wait in timeline.waits if wait.action == Action("B", 0, 1)]
    assert (wait.stage, wait.source, wait.made_by) == (0, 1, Action("B", 1, 1))
    # It began while stage 1 was at it, and lasted until that had ended.
    began = timeline.measured.starts[1, wait.made_by]
    assert began <= wait.start + wait.seconds and wait.end >= timeline.measured.ends(1, wait.made_by)
