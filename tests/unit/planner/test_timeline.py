"""A traced step beside its schedule: bubbles, waits and their causes of traces whose figures are known."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megalite.launcher.control.step_trace import RankTrace, TracedSpan
from megalite.planner import timeline as timeline_module
from megalite.planner.bubble import bubble
from megalite.planner.timeline import PipelineTimeline, pipeline_timelines
from megalite.planner.traces import TracedStep, read_step
from megalite.topology.schedule_timeline import Costs, ideal_timeline
from megalite.topology.schedules import SCHEDULES, Action
from tests.support.parity import read_off
from tests.unit.planner.traced import STARTED_AT, played, rank_trace, write_run

SIZES = [(name, 4, 8, schedule.default_chunks) for name, schedule in SCHEDULES.items()]
# Binary fractions: sums are exact.
BY_CHUNK = (1.0, 0.5, 0.75, 1.25, 1.5, 0.25, 1.0, 2.0)


def timeline_of(folder: Path, ranks: list[RankTrace]) -> PipelineTimeline:
    """Return the only pipeline of a step, by way of its files."""
    [timeline] = pipeline_timelines(read_step(write_run(folder, ranks)))
    return timeline


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size[0])
def test_a_step_that_runs_as_its_costs_say_has_the_bubble_of_its_simulation(
    tmp_path: Path, size: tuple[str, int, int, int]
) -> None:
    stages, chunks = size[1], size[3]
    costs = Costs(1, 1.75, 0.75, 1.25, BY_CHUNK[: stages * chunks])
    timeline = timeline_of(tmp_path, played(*size, costs))
    right = ideal_timeline(*size, costs)
    assert timeline.measured.bubble == read_off(right.bubble) and timeline.simulated.bubble == read_off(
        right.bubble
    )
    assert timeline.measured.starts == read_off(right.starts)
    assert timeline.formula == bubble(*size) and timeline.ideal.bubble == read_off(
        ideal_timeline(*size).bubble
    )
    # All three do the same work.
    lengths = [
        (1 - row.bubble) * row.length for row in (timeline.ideal, timeline.simulated, timeline.measured)
    ]
    assert lengths == [read_off(lengths[0])] * 3
    for shares in timeline.stages:
        parts = (shares.busy, shares.waits, shares.between, shares.after)
        assert sum(parts) == read_off(timeline.measured.length) and min(parts) > -1e-5


def two_stages() -> list[RankTrace]:
    """Stage 1 is slow, each message travels for 0.5, and stage 0 pauses for 1 before its last action."""
    first = {
        Action("F", 0, 0): (2.0, 4.0),
        Action("F", 0, 1): (4.0, 6.0),
        Action("B", 0, 0): (14.5, 16.5),
        Action("B", 0, 1): (24.0, 27.0),
    }
    last = {
        Action("F", 1, 0): (4.5, 7.0),
        Action("B", 1, 0): (7.0, 14.0),
        Action("F", 1, 1): (14.0, 16.5),
        Action("B", 1, 1): (16.5, 22.5),
    }
    return [
        rank_trace(
            "1f1b", (2, 2, 1), 0, first, [TracedSpan("B", 0, 0, 6.0, 14.5), TracedSpan("B", 0, 1, 16.5, 23.0)]
        ),
        rank_trace(
            "1f1b", (2, 2, 1), 1, last, [TracedSpan("F", 1, 0, 0.5, 4.5), TracedSpan("F", 1, 1, 14.0, 14.0)]
        ),
    ]


def check_two_stages(folder: Path) -> None:
    timeline = timeline_of(folder, two_stages())
    assert timeline.measured.length == read_off(25)
    assert timeline.measured.bubble == read_off(1 - (9 + 18) / 50)
    # The means: F 2 and 2.5, B 2.5 and 6.5. Stage 1 is never without work: 2 + 2 * 9 + 2.5.
    assert timeline.simulated.length == read_off(22.5) and timeline.simulated.bubble == read_off(1 - 27 / 45)
    assert timeline.formula == read_off(1 / 3)
    said = [(wait.stage, wait.action, wait.source, wait.made_by) for wait in timeline.waits]
    assert said == [
        (0, Action("B", 0, 0), 1, Action("B", 1, 0)),
        (0, Action("B", 0, 1), 1, Action("B", 1, 1)),
        # It waited from before the first action on: only what lies behind that start counts.
        (1, Action("F", 1, 0), 0, Action("F", 0, 0)),
        (1, Action("F", 1, 1), 0, Action("F", 0, 1)),
    ]
    assert [wait.seconds for wait in timeline.waits] == [
        read_off(8.5),
        read_off(6.5),
        read_off(2.5),
        read_off(0),
    ]
    assert [wait.travel for wait in timeline.waits] == [
        read_off(0.5),
        read_off(0.5),
        read_off(0.5),
        read_off(0),
    ]
    waits, between, after = zip(
        *((each.waits, each.between, each.after) for each in timeline.stages), strict=True
    )
    assert (
        waits == (read_off(15), read_off(2.5))
        and between == (read_off(1), read_off(0))
        and after == (read_off(0), read_off(4.5))
    )


def test_known_waits_have_their_culprits(tmp_path: Path) -> None:
    check_two_stages(tmp_path)


def of_the_next_chunk(span: TracedSpan) -> int:
    return 1 - made_in(span)


def over_all_chunks(durations: dict[Action, float]) -> dict[Action, float]:
    kinds = {kind: [s for action, s in durations.items() if action.kind == kind] for kind in "FBIW"}
    return {action: sum(kinds[action.kind]) / len(kinds[action.kind]) for action in durations}


made_in = timeline_module.made_in


@pytest.mark.parametrize(
    ("name", "fault"),
    [("mean_durations", over_all_chunks), ("mean_durations", dict), ("made_in", of_the_next_chunk)],
)
def test_a_planted_fault_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(timeline_module, name, fault)
    with pytest.raises(AssertionError):
        check_two_stages(tmp_path)


def test_one_stage_has_no_bubble_of_its_schedule(tmp_path: Path) -> None:
    """Gradient accumulation: what is idle lies between the actions."""
    actions = {
        Action("F", 0, 0): (0.0, 1.0),
        Action("B", 0, 0): (1.0, 3.0),
        Action("F", 0, 1): (4.0, 5.0),
        Action("B", 0, 1): (5.0, 8.0),
    }
    timeline = timeline_of(tmp_path, [rank_trace("1f1b", (1, 2, 1), 0, actions)])
    assert (timeline.formula, timeline.waits) == (0, ())
    assert timeline.simulated.bubble == read_off(0) and timeline.measured.bubble == read_off(1 / 8)
    assert timeline.stages[0].between == read_off(1)


def tensor_parallel(ranks: list[RankTrace]) -> list[RankTrace]:
    """Return two ranks a stage, of which the second one's backwards end a second later."""

    def later(span: TracedSpan) -> TracedSpan:
        return span._replace(end=span.end + 1) if span[:3] == ("B", 0, 1) else span

    doubled = []
    for rank, tensor in product(ranks, range(2)):
        number = 2 * rank.rank + tensor
        actions = [later(span) for span in rank.actions] if tensor else rank.actions
        place = {**rank.place, "tp": tensor}
        doubled.append(replace(rank, rank=number, world_size=4, place=place, actions=actions))
    return doubled


def test_the_slowest_pipeline_comes_first(tmp_path: Path) -> None:
    timelines = pipeline_timelines(read_step(write_run(tmp_path, tensor_parallel(two_stages()))))
    assert [[rank.rank for rank in timeline.ranks] for timeline in timelines] == [[1, 3], [0, 2]]
    assert [timeline.measured.length for timeline in timelines] == [read_off(26), read_off(25)]


def on_two_hosts(offset: float, leaves_late: float = 0.0) -> list[RankTrace]:
    """Return the two stages on hosts whose clocks differ.

    offset: of the second host's clock. leaves_late: the second host leaves the totals so much later.
    """
    first, last = two_stages()
    forward, totals, update = last.phases
    totals = totals._replace(end=totals.end + leaves_late)
    phases = [forward, totals, update]
    return [first, replace(last, host="b", started_at=STARTED_AT + offset, phases=phases)]


@pytest.mark.parametrize("leaves_late", [0.0, 0.25, -0.25])
@pytest.mark.parametrize("offset", [0.0, 3.5, -60.0])
def test_clocks_of_two_hosts_are_put_in_line(tmp_path: Path, offset: float, leaves_late: float) -> None:
    step = read_step(write_run(tmp_path, on_two_hosts(offset, leaves_late)))
    assert step.offsets == {"a": 0, "b": read_off(-offset - leaves_late)}
    if not leaves_late:
        assert figures(step) == figures_of_one_host(tmp_path)


@pytest.mark.parametrize("leaves_late", [2.0, -2.0])
def test_messages_bound_the_clocks(tmp_path: Path, leaves_late: float) -> None:
    """Each message travels for half a second, so the clocks cannot be further apart."""
    step = read_step(write_run(tmp_path, on_two_hosts(3.5, leaves_late)))
    assert step.offsets["b"] == read_off(-3.5 + (-0.5 if leaves_late > 0 else 0.5))


def figures(step: TracedStep) -> list[Any]:
    [timeline] = pipeline_timelines(step)
    return [read_off(timeline.measured.bubble), *(read_off(wait.travel) for wait in timeline.waits)]


def figures_of_one_host(folder: Path) -> list[Any]:
    return figures(read_step(write_run(folder, two_stages())))
