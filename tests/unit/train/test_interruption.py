"""Messages of an interrupted run about its checkpoints."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_run
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.detect import RankInfo
from megalite.train import interruption
from megalite.train.interruption import Terminated, interruption_noted, tell_interruption, termination_raised
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
        == f"interrupted: {folder} has no checkpoint yet; the same command starts from the beginning\n"
    )
    here = f"interrupted: the last checkpoint is {folder / 'step-000003'}; "
    assert said(folder / "step-000003") == here + "the same command resumes from it\n"
    again = said(folder / "step-000003", rank(0), "never")
    assert again == here + 'checkpoint.resume = "auto" resumes from it\n'
    assert said(folder / "step-000003", rank(1)) == ""
    assert said(CheckpointError("none is whole; remove it")) == "interrupted: none is whole; remove it\n"


def test_sigterm_is_raised_where_a_process_trains_alone() -> None:
    with pytest.raises(Terminated), termination_raised(None, 1):
        signal.raise_signal(signal.SIGTERM)
    for info, ranks in ((None, 2), (rank(0), 1)):
        with termination_raised(info, ranks):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def wait_for(event: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not event():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_is_noted_and_a_second_one_later_ends(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, name: str
) -> None:
    told: list[str] = []
    ended: list[tuple[str, signal.Signals]] = []
    before = signal.getsignal(number)
    with interruption_noted(told.append, lambda *each: ended.append(each)) as interrupted:
        assert interrupted() is None
        signal.raise_signal(number)
        wait_for(lambda: interrupted() is number and bool(told))
        signal.raise_signal(number)  # the same once more: from the process group and from the parent
        time.sleep(0.1)
        assert not ended
        for seconds in ("_PASSED_ON_SECONDS", "SAME_PRESS_SECONDS"):
            monkeypatch.setattr(interruption, seconds, 0.0)
        signal.raise_signal(number)
        wait_for(lambda: bool(ended))
    assert told == [f"{name}: the run saves and ends after this step; a second {name} ends it at once"]
    assert ended == [(f"{name} came again", number)]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("launched", [False, True])
def test_sigterm_behind_ctrl_c_is_the_same_one(launched: bool) -> None:
    """deepspeed sends both."""
    ended: list[tuple[str, signal.Signals]] = []
    with interruption_noted(
        lambda _: None, lambda *each: ended.append(each), launched=launched
    ) as interrupted:
        signal.raise_signal(signal.SIGINT)
        wait_for(lambda: interrupted() is not None)
        time.sleep(0.4)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
        if launched:  # the terminal's, and the launcher's
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.1)
        assert interrupted() is signal.SIGINT and not ended


def test_a_run_that_does_not_end_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, signal.Signals]] = []
    monkeypatch.setattr(interruption, "_GRACE_SECONDS", 0.1)
    with interruption_noted(lambda _: None, lambda *each: ended.append(each)) as interrupted:
        time.sleep(0.2)
        assert not ended and interrupted() is None
        signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: bool(ended))
    assert ended == [("the run was not over 0.1 s after SIGTERM", signal.SIGTERM)]


def test_a_signal_that_the_user_handles_or_ignores_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def users(number: int, frame: object) -> None:
        pass

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGTERM, users)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a shell's & set it
    try:
        with interruption_noted(lambda _: None, lambda *_: None) as interrupted:
            assert signal.getsignal(signal.SIGTERM) is users
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and interrupted() is None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)
    noted: list[object] = []

    def off_the_main_thread() -> None:
        with interruption_noted(lambda _: None, lambda *_: None) as interrupted:
            noted.append(interrupted())

    thread = threading.Thread(target=off_the_main_thread)
    thread.start()
    thread.join()
    assert noted == [None]
