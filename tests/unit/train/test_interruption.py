"""What an interrupted run says of the checkpoints there are."""

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
from megalite.train.interruption import Terminated, tell_interruption, termination_noted, termination_raised
from tests.unit.config.runs import changed, write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run(write_run(tmp_path, changed({})), ["--run.folder", str(tmp_path / "run")]).config


def rank(number: int) -> Any:
    """Of a launcher's ranks."""
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

    assert said(None) == f"interrupted: {folder} has no checkpoint yet; the same command begins anew\n"
    here = f"interrupted: the last checkpoint is {folder / 'step-000003'}; "
    assert said(folder / "step-000003") == here + "the same command goes on from there\n"
    again = said(folder / "step-000003", rank(0), "never")
    assert again == here + 'checkpoint.resume = "auto" goes on from there\n'
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


def test_sigterm_is_noted_and_a_second_one_later_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    with termination_noted(ended.append) as sigterm_received:
        assert not sigterm_received()
        signal.raise_signal(signal.SIGTERM)
        wait_for(sigterm_received)
        signal.raise_signal(signal.SIGTERM)  # the same once more: from the process group and from the parent
        time.sleep(0.1)
        assert not ended
        monkeypatch.setattr(interruption, "_ONCE_SECONDS", 0.0)
        signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: bool(ended))
    assert ended == ["SIGTERM came again"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_that_does_not_end_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(interruption, "_GRACE_SECONDS", 0.1)
    with termination_noted(ended.append) as sigterm_received:
        time.sleep(0.2)
        assert not ended and not sigterm_received()
        signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: bool(ended))
    assert ended == ["the run was not over 0.1 s after SIGTERM"]


def test_what_others_do_about_sigterm_stands() -> None:
    def others(number: int, frame: object) -> None:
        pass

    signal.signal(signal.SIGTERM, others)
    try:
        with termination_noted(lambda _: None) as sigterm_received:
            assert signal.getsignal(signal.SIGTERM) is others and not sigterm_received()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    noted: list[bool] = []

    def off_the_main_thread() -> None:
        with termination_noted(lambda _: None) as sigterm_received:
            noted.append(sigterm_received())

    thread = threading.Thread(target=off_the_main_thread)
    thread.start()
    thread.join()
    assert noted == [False]
