"""A run that goes on from a checkpoint says which settings differ, and the default folder does not join two runs."""

import os
from pathlib import Path

import pytest

from megalite.cli import main
from tests.support.jobs import training_here
from tests.support.tiny_run import SETTINGS, write_token_files


def train(*flags: str) -> int:
    # A run file, since a text alone gets a folder named after it.
    Path("run.toml").write_text('[data]\nsource = "train"\n')
    with training_here():
        return main(["train", "run.toml", *(f"--{name}={value}" for name, value in SETTINGS.items()), *flags])


def test_the_default_folder_does_not_join_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    assert train("--training.steps=2") == 0
    assert train("--training.steps=3", "--parallel.schedule=gpipe") == 0
    said = capsys.readouterr()
    assert "resumed after step 2" in said.out and "schedule" not in said.out.split("resumed after")[1]
    assert "differ from the checkpoint's: training.steps 2 -> 3: the last step is another" in said.out

    assert train("--optimizer.learning_rate=0.02", "--run.seed=7") == 2
    said = capsys.readouterr()
    assert "optimizer.learning_rate 0.01 -> 0.02, run.seed 1234 -> 7" in said.err
    last = Path("runs/default/checkpoints/step-000003")
    assert f"--checkpoint.resume {last}" in said.err and "--run.folder runs/second" in said.err
    assert {each.name for each in last.parent.iterdir() if each.is_dir()} == {"step-000002", "step-000003"}

    assert train("--optimizer.learning_rate=0.02", f"--checkpoint.resume={last}") == 0
    assert "differ from the checkpoint's: optimizer.learning_rate 0.01 -> 0.02" in capsys.readouterr().out


def test_a_named_folder_goes_on_with_other_settings_and_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    assert train("--run.folder=mine", "--training.steps=2") == 0
    assert train("--run.folder=mine", "--optimizer.weight_decay=0.0") == 0
    assert (
        "settings that differ from the checkpoint's: optimizer.weight_decay 0.1 -> 0.0: counts from the next step on"
        in capsys.readouterr().out
    )


def test_a_token_file_written_anew_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_token_files(tmp_path)
    assert train("--training.steps=1") == 0
    tokens, times = Path("train.bin"), Path("train.bin").stat()
    tokens.write_bytes(tokens.read_bytes()[2:] + tokens.read_bytes()[:2])
    os.utime(tokens, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tokens.stat().st_size == times.st_size
    assert train("--training.steps=2") == 2
    said = capsys.readouterr().err
    assert "data.source: not the text of the steps before" in said and "the files were written anew" in said

    assert train("--training.steps=2", "--checkpoint.resume_changed=true") == 0
    assert "so samples would be repeated or left out" in capsys.readouterr().out
    assert train("--training.steps=3") == 0
    assert "repeated" not in capsys.readouterr().out
