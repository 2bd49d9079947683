"""The end of ranks on two hosts that do not meet, disagree or die: the message that a person sees, and nothing left."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.jobs import Job
from tests.support.real_launchers import Started, ranks, run
from tests.support.waiting import PATIENCE, soon, wait_until

pytestmark = pytest.mark.extended

# Longer than any of these tests.
LONG = ("--training.steps", "100000", "--checkpoint.every", "100000")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "job"
    folder.mkdir()
    return Job.write(folder)


def training(started: Started) -> dict[int, int]:
    """Wait for the second step; return the ranks."""
    started.until("step      2/")
    return ranks(started.hosts)


def ended(started: Started, within: float = PATIENCE) -> str:
    """All launchers ended with a failure and left nothing; return what they printed."""
    codes = started.wait(within)
    assert 0 not in codes, started.output
    started.gone(within=soon(10))
    return started.output


def test_a_run_file_that_differs_on_one_host_is_an_error(slurm, job, tmp_path):
    hosts = slurm.hosts
    other = tmp_path / "other.toml"
    other.write_text(job.run_file.read_text().replace("learning_rate = 5e-3", "learning_rate = 1e-3"))
    corpus = job.run_file.with_name("corpus.jsonl")
    (tmp_path / "corpus.jsonl").write_bytes(corpus.read_bytes())
    hosts[1].private(job.run_file.parent)
    hosts[1].run(["cp", other, job.run_file], check=True)
    hosts[1].run(["cp", tmp_path / "corpus.jsonl", corpus], check=True)
    output = ended(run("srun", hosts, ["megalite", *job.arguments(tmp_path / "run")]))
    for word in ("optimizer.learning_rate", "0.005", "0.001", "n0", "n1"):
        assert word in output, output


def test_a_run_file_that_one_host_lacks_ends_all_ranks_and_says_where(slurm, job, tmp_path):
    slurm.hosts[1].private(job.run_file.parent)
    output = ended(run("srun", slurm.hosts, ["megalite", *job.arguments(tmp_path / "run")]))
    assert "run.toml" in output and "n1" in output, output


def test_ranks_that_do_not_come_are_named_in_bounded_time(hosts, job, tmp_path):
    hosts[1].die()
    flags = ("--launch.rendezvous_seconds", "12")
    started = run("deepspeed-pdsh", hosts, ["megalite", *job.arguments(tmp_path / "run", *flags)])
    output = ended(started, within=12 + soon(30))
    assert "waiting for ranks 2-3 on host n1 " in output, output
    assert re.search(r"error: .*ranks 2-3 on host n1 did not arrive within 12 s", output), output


def test_nothing_is_left_of_an_mpirun_that_is_killed_before_the_ranks_have_met(hosts, job, tmp_path):
    started = run("openmpi", hosts, ["megalite", *job.arguments(tmp_path / "run", *LONG)])
    mpirun = started.launchers[0]
    wait_until(lambda: len(ranks(hosts)) >= 4, "mpirun starts no four ranks", process=mpirun)
    hosts[0].send(mpirun, signal.SIGKILL)
    started.gone(within=soon(20))
    assert mpirun.wait(timeout=PATIENCE) == -signal.SIGKILL


def test_a_remote_rank_that_is_killed_is_named_and_ends_all(hosts, job, tmp_path):
    started = run("deepspeed-pdsh", hosts, ["megalite", *job.arguments(tmp_path / "run", *LONG)])
    os.kill(training(started)[3], signal.SIGKILL)
    output = ended(started, within=soon(20))
    assert re.search(r"rank 3 .*n1", output), output
    assert "last seen " in output, output


def test_a_single_included_host_runs_the_job_though_it_was_typed_on_another(hosts, job, tmp_path):
    """A plain `deepspeed --include n1` typed on n0 runs on n0."""
    flags = ("--parallel.pipeline", "1", "--training.steps", "2")
    command = ["megalite", *job.arguments(tmp_path / "run", *flags)]
    started = run("launch-deepspeed", hosts, command, options=["--include", "n1"])
    assert started.wait() == [0], started.output
    assert "all ranks are here: 2 on n1;" in started.output, started.output


def test_nothing_is_left_of_a_launch_with_deepspeed_that_is_killed(hosts, job, tmp_path):
    """A plain `deepspeed` that is killed leaves pdsh and all ranks at work."""
    started = run("launch-deepspeed", hosts, ["megalite", *job.arguments(tmp_path / "run", *LONG)])
    assert len(training(started)) == 4
    hosts[0].send(started.launchers[0], signal.SIGKILL)
    started.gone(within=soon(20))


def test_a_cable_that_is_pulled_is_reported(slurm, job, tmp_path):
    hosts = slurm.hosts
    flags = (*LONG, "--launch.heartbeat_seconds", "5")
    started = run("srun", hosts, ["megalite", *job.arguments(tmp_path / "run", *flags)])
    assert len(training(started)) == 4
    before = len(started.output)
    hosts[1].link(up=False)
    wait_until(lambda: not ranks(hosts), "ranks outlive the cable", 5 + soon(15))
    assert re.search(r"n1", started.output[before:]), started.output[before:]
