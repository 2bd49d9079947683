"""Ranks that a launcher starts with different settings, too few of them, or with a run file that cannot be read."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job
from tests.support.waiting import PATIENCE

RANKS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"), tensor=1, pipeline=RANKS)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start(rank: int, port: int, run_file: Path, folder: Path, *flags: str) -> subprocess.Popen[str]:
    given = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "megalite", "train", str(run_file), "--run.folder", str(folder), *flags],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in (given | place).items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Wait for the ranks; return the exit code and the output of each."""
    try:
        return [
            (process.returncode, out)
            for process in processes
            for out in [process.communicate(timeout=PATIENCE)[0]]
        ]
    finally:
        for process in processes:
            process.kill()


def test_ranks_with_another_learning_rate_are_told_the_key_and_both_values(job, port, tmp_path):
    rates = ("3e-3", "1e-3")
    ranks = [
        start(rank, port, job.run_file, tmp_path, "--optimizer.learning_rate", rate)
        for rank, rate in enumerate(rates)
    ]
    [(first, told), (second, _)] = ended(*ranks)
    host = socket.gethostname()
    assert f"optimizer.learning_rate: 0.003 on {host} (rank 0), 0.001 on {host} (rank 1)" in told
    assert "give every host the same run file" in told
    assert (first, second) == (2, 2)


def test_a_rank_that_cannot_read_its_run_file_ends_the_others(job, port, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text(job.run_file.read_text().replace("hidden_size = 32", "hidden_size = 33"))
    [(first, told), (second, _)] = ended(
        start(0, port, job.run_file, tmp_path), start(1, port, broken, tmp_path)
    )
    assert f"error: rank 1 on {socket.gethostname()}: {broken} has" in told
    assert (first, second) == (2, 2)


def test_a_run_file_that_no_rank_can_read_is_told_once(job, port, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text(job.run_file.read_text().replace("hidden_size = 32", "hidden_size = 33"))
    outcomes = ended(*(start(rank, port, broken, tmp_path) for rank in range(RANKS)))
    assert [code for code, _ in outcomes] == [2, 2]
    assert sum(told.count(f"{broken} has") for _, told in outcomes) == 1


def test_a_rank_that_does_not_come_is_named(job, port, tmp_path):
    [(code, told)] = ended(start(0, port, job.run_file, tmp_path, "--launch.rendezvous_seconds", "3"))
    assert "error: rank 1 did not arrive within 3 s (launch.rendezvous_seconds); here: rank 0 on" in told
    assert code == 1


@pytest.mark.extended
def test_a_port_in_use_is_told_in_one_line_by_rank_0(job, tmp_path):
    """Rank 1 finds the other program at the port, and gives up in bounded time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--launch.rendezvous_seconds", "6")
        [(first, told), (second, waited)] = ended(
            *(start(rank, port, job.run_file, tmp_path, *flags) for rank in range(RANKS))
        )
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    owner = f"pid {os.getpid()}"
    assert len(errors) == 1 and f"port {port} on {socket.gethostname()} is in use by {owner}" in errors[0], (
        told
    )
    assert errors[0].endswith("set MASTER_PORT to a free port on every host") and first == 2
    assert f"did not reach the coordinator of the job at 127.0.0.1:{port} within" in waited and second == 1, (
        waited
    )


@pytest.mark.extended
def test_a_run_folder_in_use_ends_all_ranks(job, port, tmp_path):
    with (tmp_path / ".in-use").open("wb") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        [(first, told), (second, _)] = ended(
            *(start(rank, port, job.run_file, tmp_path) for rank in range(RANKS))
        )
    assert f"another job uses {tmp_path}" in told
    assert (first, second) == (2, 2)
