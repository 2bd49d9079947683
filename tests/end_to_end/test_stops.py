"""A run that is told to stop while a checkpoint or a validation is under way, on a good, slow, full or hanging disk."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.checkpoint.folder import find_latest
from tests.support.jobs import ROOT, Job, curve
from tests.support.waiting import PATIENCE, soon, wait_until

GRACE_SECONDS = 2


class Told:
    """A run of one rank with a fault that begins right before SIGTERM comes."""

    def __init__(self, folder: Path, fault: str, *flags: str):
        self.folder = folder / "run"
        job, now = Job.write(folder, tensor=1, pipeline=1), folder / "now"
        grace = ("--launch.grace_seconds", str(GRACE_SECONDS))
        if fault != "exports":
            grace = (*grace, "--training.steps", "100000")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.disturbed_run", fault, now),
                *job.arguments(self.folder, *grace, *flags),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while "step " not in (line := process.stdout.readline()):
                assert line, "ended before its first step"
            if fault == "exports":
                wait_until(now.exists, "no export")
            now.touch()
            time.sleep(1)  # a regular checkpoint or a validation begins
            process.send_signal(signal.SIGTERM)
            told_at = time.monotonic()
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        self.seconds = time.monotonic() - told_at
        self.code, self.output, self.last = (
            process.returncode,
            output,
            find_latest(self.folder / "checkpoints"),
        )

    @property
    def saved_all(self) -> bool:
        """Whether the last checkpoint is that of the last step."""
        return self.last is not None and self.last.name == f"step-{curve(self.folder)[-1][0]:06d}"


@pytest.mark.slow  # the next test waits for two
def test_a_save_that_takes_longer_than_the_grace_time_is_completed(tmp_path):
    run = Told(tmp_path, "slow", "--checkpoint.every", "unset")
    assert run.code == 75 and run.saved_all, run.output
    assert run.seconds > 2 * GRACE_SECONDS


@pytest.mark.extended
def test_a_checkpoint_in_flight_is_completed_too(tmp_path):
    """The asynchronous one that is under way, and the one of the last step."""
    run = Told(tmp_path, "slow", "--checkpoint.every", "1")
    assert run.code == 75 and run.saved_all, run.output
    assert len(list((run.folder / "checkpoints").glob("step-*"))) >= 2
    assert not list((run.folder / "checkpoints").glob(".step-*"))


@pytest.mark.extended
@pytest.mark.parametrize("restarts", [0, 1], ids=["", "in a process of its own"])
def test_a_save_that_stands_still_is_ended(tmp_path, restarts):
    run = Told(tmp_path, "hangs", "--checkpoint.every", "unset", "--launch.restarts", str(restarts))
    assert run.code == 143 and run.last is None, run.output
    assert run.output.count("interrupted:") == 1, run.output
    assert re.search(r"ended without saving a checkpoint: .* 2 s \(launch.grace_seconds\)", run.output)
    assert GRACE_SECONDS <= run.seconds < GRACE_SECONDS + soon(5)


@pytest.mark.extended
def test_a_full_disk_at_the_last_save_is_a_failure_that_names_it(tmp_path):
    run = Told(tmp_path, "full", "--checkpoint.every", "unset")
    assert run.code == 2 and "No space left on device" in run.output, run.output
    assert "interrupted:" not in run.output


@pytest.mark.extended
def test_an_export_that_does_not_end_leaves_a_run_that_the_next_start_completes(tmp_path):
    run = Told(tmp_path, "exports", "--checkpoint.export", "true", "--training.steps", "2")
    assert run.code == 75 and run.saved_all, run.output
    assert "SIGTERM: every step is saved; the run ends after the export" in run.output
    assert GRACE_SECONDS <= run.seconds < GRACE_SECONDS + soon(5)
    job = Job(tmp_path / "run.toml")
    assert "nothing left to train" in job.run(
        run.folder, "--checkpoint.export", "true", "--training.steps", "2"
    )
    assert (run.folder / "export" / "model.safetensors").exists()


@pytest.mark.extended
def test_a_validation_is_cut_short_by_a_signal(tmp_path):
    """It would take three times the grace time."""
    run = Told(tmp_path, "validates", "--validation.every", "1", "--data.split", "[0.8, 0.2]")
    assert run.code == 75 and run.saved_all, run.output
