"""The time that is left of a SLURM allocation, from its variables or from a squeue of the test."""

import subprocess
import time
from pathlib import Path

import pytest

from megalite.launcher.rank import allocation
from megalite.launcher.rank.allocation import TimeLeft, time_left


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is found as squeue: it answers with the text of the file, and notes its arguments."""
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/answer\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_outside_of_slurm_nothing_is_asked(squeue: Path) -> None:
    assert time_left({"PATH": "x"}) == TimeLeft(None)
    assert not (squeue / "asked").exists()


def test_the_variable_of_newer_slurm_counts(squeue: Path) -> None:
    left = time_left({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 500)})
    assert abs((left.seconds or 0) - 500) < 3 and not left.note
    assert not (squeue / "asked").exists()


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [("1-02:03:04", 93784), ("23:00:00", 82800), ("59:58", 3598), ("0:07", 7), ("UNLIMITED", None)],
)
def test_squeue_is_asked_otherwise(squeue: Path, answer: str, seconds: int | None) -> None:
    (squeue / "answer").write_text(f"{answer}\n")
    assert time_left({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": ""}) == TimeLeft(seconds)
    assert (squeue / "asked").read_text() == "--noheader --jobs=7 --format=%L\n"


@pytest.mark.parametrize("answer", ["INVALID", "NOT_SET", "", "1:2:3:4"])
def test_another_answer_is_a_note(squeue: Path, answer: str) -> None:
    (squeue / "answer").write_text(answer)
    assert time_left({"SLURM_JOB_ID": "7"}) == TimeLeft(None, f"squeue answered {answer!r}")


def test_a_squeue_that_is_missing_fails_or_hangs_is_a_note(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (squeue / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error >&2; exit 1\n")
    assert time_left({"SLURM_JOB_ID": "7"}).note == "squeue failed: slurm_load_jobs error"

    def hangs(command: list[str], **settings: float) -> None:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(allocation.subprocess, "run", hangs)
    assert time_left({"SLURM_JOB_ID": "7"}).note == "squeue has not answered within 10 s"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(squeue / "nothing"))
    assert time_left({"SLURM_JOB_ID": "7"}).note.startswith("squeue cannot be run: No such file")
