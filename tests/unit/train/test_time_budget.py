"""Whether the time is enough for another step and the last checkpoint, on a clock that the test turns."""

import pickle
import time
from pathlib import Path

import pytest

from megalite.config.load import load_run
from megalite.launcher.rank.allocation import TimeLeft
from megalite.train import time_budget as module
from megalite.train.time_budget import MARGIN_SECONDS, Deadline, TimeBudget, time_budget
from tests.unit.config.runs import changed, write_run


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_a_deadline_there_is_always_time() -> None:
    budget = TimeBudget()
    budget.stepped(1e9)
    assert not budget.limited and budget.reason_to_stop(save_seconds=1e9) is None


def test_the_slowest_recent_step_the_save_and_a_margin_must_fit() -> None:
    clock = Clock()
    budget = TimeBudget([Deadline(9000.0, "later"), Deadline(2000.0, "dinner")], clock)
    budget.stepped(300.0)  # compiles: it counts as long as there is no other
    clock.now = 2000 - (300 + 50 + MARGIN_SECONDS)
    assert budget.reason_to_stop(save_seconds=50) == "360 s before dinner"
    for seconds in (30.0, 40.0, 20.0):
        budget.stepped(seconds)
    assert budget.reason_to_stop(save_seconds=50) is None
    clock.now = 2000 - (40 + 50 + MARGIN_SECONDS) - 0.1
    assert budget.reason_to_stop(save_seconds=50) is None
    clock.now += 0.2
    assert budget.reason_to_stop(save_seconds=50) == "100 s before dinner"
    for _ in range(20):
        budget.stepped(20.0)  # the slow step is no longer recent
    assert budget.reason_to_stop(save_seconds=50) is None
    clock.now = 2004.0
    assert budget.reason_to_stop(save_seconds=50) == "4 s after dinner"


def test_before_a_validation_the_longest_one_counts() -> None:
    clock = Clock()
    clock.now = 1900.0
    budget = TimeBudget([Deadline(2000.0, "dinner")], clock)
    for seconds in (5.0, 5.0):
        budget.stepped(seconds)
    for seconds in (80.0, 8.0):
        budget.validated(seconds)
    assert budget.reason_to_stop(save_seconds=15) is None
    assert budget.reason_to_stop(save_seconds=15, validates=True) == "100 s before dinner"


@pytest.mark.parametrize(("given", "seconds", "shown"), [("1h30m", 5400, "1h30m"), (3600, 3600, "3600")])
def test_stop_after_counts_from_the_start_and_the_allocation_from_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | int, seconds: int, shown: str
) -> None:
    run_file = write_run(tmp_path, changed({"training.stop_after": given}))
    config = load_run(run_file).config
    assert str(load_run(run_file, ["--training.stop_after", shown]).config.training.stop_after) == shown
    said: list[str] = []

    def budget(left: TimeLeft) -> TimeBudget:
        said.clear()
        monkeypatch.setattr(module, "time_left", lambda _: left)
        return time_budget(config, time.monotonic() - 1000, said.append)

    alone = budget(TimeLeft(None))
    assert abs(alone.first.at_seconds - time.monotonic() - (seconds - 1000)) < 5
    name = f"the end of training.stop_after ({shown})"
    assert said == [f"time: the run saves and stops before {name}"] and alone.first.name == name
    later = budget(TimeLeft(86400.0))
    assert later.first == alone.first or later.first.name == name
    assert budget(TimeLeft(None, "squeue failed: no")).limited and len(said) == 1
    earlier = pickle.loads(pickle.dumps(budget(TimeLeft(100.0))))  # as spawned ranks get it
    assert abs(earlier.first.at_seconds - time.monotonic() - 100) < 5
    assert "the end of the allocation at " in said[0]


def test_an_allocation_without_a_known_end_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run(write_run(tmp_path, changed({}))).config
    said: list[str] = []
    monkeypatch.setattr(module, "time_left", lambda _: TimeLeft(None, "squeue answered 'INVALID'"))
    assert not time_budget(config, 0.0, said.append).limited
    assert said == [
        "note: the end of the allocation is unknown (squeue answered 'INVALID'); training.stop_after can stop the run "
        "before it"
    ]
