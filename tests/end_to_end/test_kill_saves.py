"""A few of the 200 kills of `python -m tests.end_to_end.kill_saves`, and what it would find."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.kill_saves import PUBLISHED, WORLD, Job, check
from tests.support.jobs import ROOT


@pytest.mark.extended
def test_ten_kills_leave_whole_checkpoints_only() -> None:
    command = [sys.executable, "-m", "tests.end_to_end.kill_saves", "--kills", "10", "--between", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_is_lost_or_torn_is_found(tmp_path: Path) -> None:
    job = Job(tmp_path, "waiting", [(PUBLISHED, step, 0.0) for step in (6, 7)])
    for step in (5, 6, 7):
        WORLD.save(tmp_path, step=step, version=step)
    assert check(tmp_path, job, {4, 5}) == {5, 6, 7}
    for step in (7, 6, 5):
        (tmp_path / f"step-00000{step}").rename(tmp_path / "away")
        with pytest.raises(AssertionError, match=f"{step}"):
            check(tmp_path, job, {4, 5})
        (tmp_path / "away").rename(tmp_path / f"step-00000{step}")
    WORLD.save(tmp_path / "other", step=6, version=7)
    (tmp_path / "step-000006").rename(tmp_path / "away")
    (tmp_path / "other" / "step-000006").rename(tmp_path / "step-000006")
    with pytest.raises(AssertionError):
        check(tmp_path, job, {4, 5})
