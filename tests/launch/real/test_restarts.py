"""A job that loses a rank or a host goes on from its last checkpoint: the same losses, or fewer ranks."""

import re
import sys
import time
from pathlib import Path

import pytest

from megalite.cli.attempt_end import published_step
from tests.support.hosts import ROOT, Hosts, wait_until
from tests.support.jobs import Job, curve

pytestmark = pytest.mark.extended

ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"), tensor=2, pipeline=1, data=2)


def launch(hosts: Hosts, job: Job, folder: Path, *options: str):
    """`megalite launch` on n0; checkpoints every step."""
    arguments = job.arguments(folder, *options)[1:]
    command = [sys.executable, "-m", "megalite", "launch", *arguments, "--checkpoint.every", "2"]
    return hosts[0].popen(
        [*command, "--hostfile", str(hosts.hostfile(slots=2)), "--backend", "ssh"], env=ENVIRONMENT
    )


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(hosts, job, tmp_path):
    steps = ("--training.steps", "60")
    process = launch(hosts, job, tmp_path / "run", "--restarts", "2", *steps)
    wait_until(lambda: (published_step(tmp_path / "run") or 0) >= 4, 90, "no checkpoint")
    hosts[1].kill("megalite train")
    killed = time.time()
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert re.search(
        r"^restart 1 of 2 in 1 s, from the checkpoint of step \d+, after: .*n1", output, re.MULTILINE
    ), output
    assert "1 earlier attempt failed" in output
    job.run(tmp_path / "by-itself", *steps)
    assert curve(tmp_path / "run") == curve(tmp_path / "by-itself")
    assert killed
