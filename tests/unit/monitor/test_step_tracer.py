"""Traces of chosen steps: their phases follow each other, and other steps cost nothing."""

from pathlib import Path

import pytest
import torch

from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.step_trace import HostClock, TracedStepFacts, trace_file
from megalite.monitor.step_tracer import StepTracer, clock_of
from megalite.planner.traces import read_step

FACTS = TracedStepFacts(0, 0, 1, {"pp": 0, "dp": 0, "tp": 0}, "a", "cpu", "1f1b", 1, 1, 1)


def make_step(tracer: StepTracer, step: int) -> None:
    with tracer.step(step):
        progress.begin(Activity.FORWARD_BACKWARD)
        for kind in ("F", "B"):
            with progress.span("actions", (kind, 0, 0)):
                pass
        progress.begin(Activity.TOTALLING)
        progress.finished(step)


@pytest.fixture
def tracer(tmp_path: Path) -> StepTracer:
    progress.restart()
    progress.finished(2)
    return StepTracer([3, 5], tmp_path / "traces", FACTS, torch.device("cpu"))


def test_chosen_steps_leave_a_file_and_no_other_does(tracer: StepTracer, tmp_path: Path) -> None:
    for step in range(1, 7):
        make_step(tracer, step)
    assert sorted(path.parent.name for path in tmp_path.rglob("*.json")) == ["step-000003", "step-000005"]
    trace = read_step(tmp_path, 3).facts
    assert (trace.step, trace.rank, [span[:3] for span in trace.actions]) == (
        3,
        0,
        [("F", 0, 0), ("B", 0, 0)],
    )
    assert [phase.name for phase in trace.phases] == [
        "between two steps",
        "forward and backward",
        "summing the step's totals",
        "between two steps",
    ]
    ends = [phase.end for phase in trace.phases]
    assert [phase.start for phase in trace.phases][1:] == ends[:-1] == sorted(ends[:-1])
    forward, backward = trace.actions
    assert trace.phases[1].start <= forward.start <= forward.end <= backward.start <= backward.end <= ends[1]


def test_what_is_not_traced_takes_no_stamp(monkeypatch: pytest.MonkeyPatch, tracer: StepTracer) -> None:
    def stamp() -> float:
        raise AssertionError

    monkeypatch.setattr(HostClock, "stamp", staticmethod(stamp))
    make_step(tracer, 4)
    # The same object each time.
    assert progress.span("actions", ("F", 0, 0)) is progress.span("waits", ("B", 0, 0))
    with pytest.raises(AssertionError):
        make_step(tracer, 5)


def test_a_step_that_fails_leaves_no_file(tracer: StepTracer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the moon"), tracer.step(3):
        raise ValueError("the moon")
    assert progress.trace is None and not trace_file(tmp_path / "traces", 3, 0).exists()


def test_a_file_that_cannot_be_written_ends_no_run(tracer: StepTracer, tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    make_step(tracer, 3)
    folder = tmp_path / "traces" / "step-000003"
    assert tracer.failure == f"{folder} is not complete: Not a directory"
    (tmp_path / "traces").unlink()
    make_step(tracer, 5)
    assert tracer.failure == "" and trace_file(tmp_path / "traces", 5, 0).exists()


def test_a_cpu_has_the_clock_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.seconds(clock.stamp()) >= 0
