"""Signals of a real SLURM, and the end of its allocation: ranks of a step save, end with 75, and go on bit for bit."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from megalite.checkpoint.folder import find_latest
from tests.support.hosts import ROOT
from tests.support.jobs import Job, curve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.extended

# More than ranks make in the second that a signal takes.
STEPS = 60


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"))


def submit(slurm, folder: Path, job: Job, *options: str, steps: int, rows: int = 8) -> int:
    """Submit a job of four ranks on two nodes whose log is FOLDER/log. rows: of the global batch."""
    flags = ("--training.steps", str(steps), "--training.global_batch_size", str(rows))
    train = shlex.join([sys.executable, *job.command(folder / "run", *flags)[1:]])
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun {train}\n")
    tasks = ("--nodes=2", "--ntasks-per-node=2", f"--output={folder}/log", "--open-mode=append")
    return slurm.submit(*tasks, *options, script, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT)


def logged(folder: Path, text: str) -> bool:
    log = folder / "log"
    return log.exists() and text in log.read_text()


def wait_for(folder: Path, text: str) -> None:
    def read() -> bool:
        return logged(folder, text)

    wait_until(read, f"{text!r} is not in {folder / 'log'}")


def test_sigusr1_to_a_step_saves_and_the_next_job_goes_on_bit_for_bit(slurm, job, tmp_path):
    """The first job knows the end of its allocation, and is signalled once before its first step."""
    # A first step that is not over before the signal comes, however busy the machine is.
    early = submit(slurm, tmp_path, job, "--time=10", steps=STEPS, rows=8192)
    wait_for(tmp_path, "time: the run saves and stops before the end of the allocation at ")
    # Before that, a rank that still starts would die of the signal.
    wait_for(tmp_path, "all ranks are here: ")
    slurm.run(["scancel", "--signal=TERM", str(early)])
    assert slurm.wait(early, "FAILED")["ExitCode"] == "76:0"
    assert logged(tmp_path, "SIGTERM before the end of the first step")

    first = submit(slurm, tmp_path, job, "--time=10", steps=STEPS)
    wait_for(tmp_path, "saved step-000003")
    slurm.run(["scancel", "--signal=USR1", str(first)])
    signalled = time.time()
    assert slurm.wait(first, "FAILED")["ExitCode"] == "75:0", (tmp_path / "log").read_text()
    assert logged(tmp_path, "SIGUSR1: the run saves and ends after this step")
    last = find_latest(tmp_path / "run" / "checkpoints")
    assert last is not None and last.name != f"step-{STEPS:06}"
    print(f"signal to published checkpoint: {last.stat().st_mtime - signalled:.2f} s")

    second = submit(slurm, tmp_path, job, "--time=10", steps=STEPS)
    slurm.wait(second, "COMPLETED")
    job.run(tmp_path / "undisturbed", "--training.steps", str(STEPS))
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_ends_in_good_order_before_its_allocation(slurm, job, tmp_path):
    """The shortest time limit that SLURM has is a minute; nobody sends a signal."""
    number = submit(slurm, tmp_path, job, "--time=1", steps=100000)
    ended = slurm.wait(number, "FAILED")
    assert ended["ExitCode"] == "75:0", (tmp_path / "log").read_text()
    assert logged(tmp_path, " s before the end of the allocation at ")
    assert logged(tmp_path, "interrupted: the last checkpoint is ")
