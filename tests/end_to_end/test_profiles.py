"""A run that cannot write a profile trains on, and a resumed one profiles a later step."""

from pathlib import Path

import pytest

from megalite.cli import main
from tests.support.jobs import training_here
from tests.support.tiny_run import SETTINGS, write_token_files


def train(*flags: str) -> int:
    Path("run.toml").write_text('[data]\nsource = "train"\n[run]\nfolder = "run"\n')
    settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
    with training_here():
        return main(["train", "run.toml", *settings, *flags])


def test_a_profile_that_fails_ends_no_run_and_a_later_step_of_the_resumed_run_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    Path("run").mkdir()
    Path("run/profiles").write_text("in the way")
    assert train("--training.steps=2", "--monitor.profile_steps=[1]") == 0
    folder = Path("run/profiles/step-000001")
    assert (
        f"warning: profile of step 1, rank 0: {folder} is not complete: Not a directory"
        in capsys.readouterr().out
    )
    Path("run/profiles").unlink()
    assert train("--training.steps=4", "--monitor.profile_steps=[1, 4]") == 0
    said = capsys.readouterr().out
    assert "resumed after step 2" in said and "differ from the checkpoint's: training.steps 2 -> 4" in said
    assert "profiled step 4: run/profiles/step-000004; " in said and "profiled step 1:" not in said
    assert [folder.name for folder in Path("run/profiles").iterdir()] == ["step-000004"]
