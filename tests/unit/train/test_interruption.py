"""What an interrupted run says of the checkpoints there are."""

import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.config.load import load_config
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.environment import RankInfo
from megalite.train import interruption
from megalite.train.interruption import Terminated, tell_interruption, termination_raised
from tests.unit.config.runs import changed, write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_run(tmp_path, changed({})), ["--run.folder", str(tmp_path / "run")])


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
