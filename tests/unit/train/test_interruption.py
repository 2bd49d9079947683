"""Signals to a run, from the start of its process to its end; and the messages about its checkpoints."""

import faulthandler
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.local import Terminated
from megalite.launcher.rank.detect import RankInfo
from megalite.train import interruption
from megalite.train.interruption import (
    RankStart,
    StopSignals,
    ignore_repeated_signals,
    signals_restored,
    tell_interruption,
    termination_raised,
)
from tests.support.waiting import PATIENCE, soon, wait_until
from tests.unit.config.runs import changed, write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run(write_run(tmp_path, changed({})), ["--run.folder", str(tmp_path / "run")]).config


def rank(number: int) -> Any:
    """Return the information of a launcher's rank."""
    return type("Rank", (), {"rank": number})()


def test_each_state_of_the_folder(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(config.run.folder) / "checkpoints"

    def said(found: object, info: RankInfo | None = None, resume: str = "auto") -> str:
        def find(asked: Path) -> object:
            assert asked == folder
            if isinstance(found, CheckpointError):
                raise found
            return found

        monkeypatch.setattr(interruption, "find_latest", find)
        settings = config.checkpoint.model_copy(update={"resume": resume})
        tell_interruption(config.model_copy(update={"checkpoint": settings}), info)
        return capsys.readouterr().out

    assert (
        said(None)
        == f"interrupted: {folder} has no checkpoint yet; the same command, or a requeue of the job, starts from the"
        " beginning\n"
    )
    here = f"interrupted: the last checkpoint is {folder / 'step-000003'}; "
    assert (
        said(folder / "step-000003") == here + "the same command, or a requeue of the job, resumes from it\n"
    )
    again = said(folder / "step-000003", rank(0), "never")
    assert again == here + 'checkpoint.resume = "auto" resumes from it\n'
    assert said(folder / "step-000003", rank(1)) == ""
    assert said(CheckpointError("none is whole; remove it")) == "interrupted: none is whole; remove it\n"


BATCH = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    numbers = (*BATCH, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Clock:
    """The monotonic clock, which a test can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead, now = 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + self._ahead)

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Job:
    """Records the lines that a rank says, and the code that ends it."""

    def __init__(self, **settings: Any) -> None:
        self.told: list[str] = []
        self.ended: list[int] = []
        self.signals = StopSignals(
            self.told.append, self.ended.append, **{"grace_seconds": 240.0, **settings}
        )


@pytest.mark.parametrize("number", BATCH)
def test_a_batch_signal_is_raised_once_where_no_launcher_started_the_process(number: signal.Signals) -> None:
    with pytest.raises(Terminated), termination_raised(None):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # again, during the clean-up
            signal.raise_signal(signal.SIGUSR1)
    assert {signal.getsignal(each) for each in BATCH} == {signal.SIG_IGN}


def test_a_launched_rank_and_a_run_without_signals_keep_the_handlers() -> None:
    for info in (None, rank(0)):
        with termination_raised(info):
            assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) is (info is not None)
        assert {signal.getsignal(each) for each in BATCH} == {signal.SIG_DFL}


def test_a_caller_from_python_gets_its_handlers_back() -> None:
    with signals_restored():
        ignore_repeated_signals()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("number", BATCH)
def test_a_batch_signal_is_noted_and_its_repetitions_change_nothing(
    number: signal.Signals, clock: Clock
) -> None:
    """SLURM sends SIGCONT with each, and SIGTERM again when the time is over."""
    job = Job()
    with job.signals as signals:
        signals.first_step_over()
        assert signals() is None
        signal.raise_signal(signal.SIGCONT)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGCONT)
        wait_until(lambda: signals() is number and bool(job.told), "the signal was not noticed")
        clock.advance(100)  # the next ones come much later
        for each in (signal.SIGTERM, signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(each)
        time.sleep(0.1)
        assert signals() is number
    assert job.told == [
        f"{number.name}: the run saves and ends after this step; without progress it is ended after 240 s "
        "(launch.grace_seconds)"
    ]
    assert not job.ended
    # The process is ending, and signals may still come.
    assert {signal.getsignal(each) for each in BATCH} == {signal.SIG_IGN}


@pytest.mark.parametrize("launched", [False, True])
def test_a_second_ctrl_c_ends_at_once(launched: bool, clock: Clock) -> None:
    job, before = (
        Job(start=RankStart.LAUNCHED if launched else RankStart.LOCAL),
        signal.getsignal(signal.SIGINT),
    )
    with job.signals as signals:
        signals.first_step_over()
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: signals() is signal.SIGINT and bool(job.told), "the signal was not noticed")
        signal.raise_signal(signal.SIGINT)  # the same once more: from the process group and from the parent
        time.sleep(0.1)
        assert not job.ended
        clock.advance(0.5)
        if launched:  # the launcher passes on what the terminal has sent to all
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
            assert not job.ended
            clock.advance(0.6)
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
    assert job.told[0] == "Ctrl-C: the run saves and ends after this step; a second Ctrl-C ends it at once"
    assert job.told[1:] == ["ended without saving a checkpoint: Ctrl-C came again"] and job.ended == [130]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_behind_sigterm_ends_at_once_and_sigterm_behind_ctrl_c_does_not(clock: Clock) -> None:
    """deepspeed sends both."""
    for first, second, ended in (
        (signal.SIGTERM, signal.SIGINT, [143]),
        (signal.SIGINT, signal.SIGTERM, []),
    ):
        job = Job()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with job.signals as signals:
            signals.first_step_over()
            signal.raise_signal(first)
            wait_until(lambda signals=signals: signals() is not None, "the signal was not noticed")  # type: ignore[misc]
            clock.advance(5)
            signal.raise_signal(second)
            if ended:
                wait_until(lambda job=job: bool(job.ended), "the signal was not noticed")  # type: ignore[misc]
            time.sleep(0.05)
            assert signals() is first
        assert job.ended == ended
        assert ("Ctrl-C came after SIGTERM" in job.told[-1]) is bool(ended)


@pytest.mark.parametrize("number", [*BATCH, signal.SIGINT])
def test_a_signal_before_the_end_of_the_first_step_ends_a_rank_at_once(number: signal.Signals) -> None:
    """From the thread: the main one may hang in native code, or wait for a rank that never comes."""
    job, others = Job(), list[tuple[str, int]]()
    with job.signals as signals:
        signals.on_end(lambda *each: others.append(each))
        signal.raise_signal(number)
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
    name = "Ctrl-C" if number is signal.SIGINT else number.name
    assert job.told == [f"{name} before the end of the first step: the run ends, there is nothing to save"]
    assert job.ended == [130 if number is signal.SIGINT else 76]
    # A rank that got no signal must end too.
    assert others == [(job.told[0], job.ended[0])]


@pytest.mark.parametrize("number", [*BATCH, signal.SIGINT])
def test_a_process_that_trains_alone_is_told_by_an_exception(number: signal.Signals) -> None:
    job = Job(start=RankStart.ALONE)
    with pytest.raises(KeyboardInterrupt if number is signal.SIGINT else Terminated), job.signals:
        signal.raise_signal(number)
    assert not job.ended
    job = Job(start=RankStart.ALONE)
    for each in BATCH:
        signal.signal(each, signal.SIG_DFL)
    with job.signals as signals:
        signals.first_step_over()
        signal.raise_signal(number)
        wait_until(lambda: signals() is number, "the signal was not noticed")


def test_a_signal_during_the_export_lets_it_end_within_the_grace_time() -> None:
    job = Job(grace_seconds=0.2)
    with job.signals as signals:
        signals.all_saved()
        began = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
        assert time.monotonic() - began >= 0.2
    assert job.told[0] == "SIGTERM: every step is saved; the run ends after the export"
    assert job.ended == [75]
    with pytest.raises(KeyboardInterrupt), Job().signals as signals:
        signals.all_saved()
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_does_not_end_in_time_is_ended() -> None:
    job = Job(grace_seconds=0.1)
    with job.signals as signals:
        signals.first_step_over()
        time.sleep(0.2)
        assert not job.ended and signals() is None
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
    assert job.told[1:] == [
        "ended without saving a checkpoint: the run was not over 0.1 s (launch.grace_seconds) after SIGUSR1"
    ]
    assert job.ended == [143]


def test_the_grace_time_stands_still_while_a_save_makes_progress() -> None:
    """Also that of another rank; a save that stands still is ended."""
    looks = itertools.count()
    goes_on = threading.Event()
    goes_on.set()
    job = Job(grace_seconds=0.6, saves=lambda: next(looks) if goes_on.is_set() else -1)
    with job.signals as signals:
        signals.first_step_over()
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert not job.ended, "the save goes on"
        goes_on.clear()
        stood_still = time.monotonic()
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
        assert time.monotonic() - stood_still < soon()
    assert job.told[1:] == [
        "ended without saving a checkpoint: the checkpoint stood still for 0.6 s (launch.grace_seconds)"
    ]
    assert job.ended == [143]


def test_a_disk_that_hangs_is_no_progress() -> None:
    hangs = threading.Event()
    job = Job(grace_seconds=0.2, saves=lambda: hangs.wait(PATIENCE))
    with job.signals as signals:
        signals.first_step_over()
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
    hangs.set()
    assert job.ended == [143]


def test_a_signal_that_the_user_handles_or_ignores_is_left_alone() -> None:
    def users(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, users)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a shell's & set it
    # Its handler is in native code: Python believes that there is none.
    with Path(os.devnull).open("w") as sink:
        faulthandler.register(signal.SIGUSR1, file=sink, all_threads=False)
        try:
            with termination_raised(None), Job().signals as signals:
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGTERM)
                ignore_repeated_signals()
                assert signal.getsignal(signal.SIGTERM) is users
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and signals() is None
                assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    noted: list[object] = []

    def off_the_main_thread() -> None:
        with Job().signals as signals:
            noted.append(signals())

    thread = threading.Thread(target=off_the_main_thread)
    thread.start()
    thread.join()
    assert noted == [None]


def test_a_rank_that_has_not_met_the_others_yet_meets_them_before_it_ends() -> None:
    """The others, which may have got no signal, would wait for it."""
    job, others = Job(start=RankStart.MEETING), list[str]()
    with job.signals as signals:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert signals() is signal.SIGTERM and not job.ended
        signals.on_end(lambda reason, code: others.append(reason))
        wait_until(lambda: bool(job.ended), "the signal was not noticed")
    assert others == job.told and job.ended == [76]
