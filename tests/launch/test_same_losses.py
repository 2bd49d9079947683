"""The deepspeed launcher and torchrun train the same run file to the same losses as megalite's own ranks."""

import os
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT, Job, curve

STEPS = ("--training.steps", "6")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"), tensor=2, pipeline=1, data=2)


@pytest.fixture(scope="module")
def by_itself(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    job.run(folder, *STEPS)
    return curve(folder)


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh"])
def test_a_launcher_gives_the_same_losses(job, by_itself, tmp_path, script):
    environment = {**os.environ, "RUN": str(job.run_file), "RANKS": "4", "PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", str(ROOT / "launch" / script), "--run.folder", str(tmp_path / "run"), *STEPS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert curve(tmp_path / "run") == by_itself
