"""Toy ranks under the real torchrun and deepspeed: whose failure is shown, and what a killed launcher leaves behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import megalite

ROOT = Path(megalite.__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
DEEPSPEED = [
    "-m",
    "deepspeed.launcher.runner",
    "--hostfile",
    "/dev/null",
    "--num_gpus",
    "4",
    "--log_level",
    "error",
]
COMMANDS = {"torchrun": TORCHRUN, "deepspeed": [*DEEPSPEED, "--no_local_rank", "--module"]}


@pytest.fixture(params=COMMANDS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator:
    processes: list[subprocess.Popen[str]] = []

    def start_job(behaviour: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            *COMMANDS[request.param],
            "tests.support.local_job",
            behaviour,
            str(tmp_path),
            "4",
        ]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return processes[-1]

    yield start_job
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def test_a_rank_that_fails_alone_is_shown_and_ends_the_others(start):
    process = start("one_raises")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "error: rank 3 (pp 0, dp 0, tp 3) on " in errors
    assert errors.count("ValueError: the moon is in the wrong place") == 1


def test_ranks_die_with_a_killed_launcher(start, tmp_path):
    start("wait")
    deadline = time.monotonic() + 60
    while len(ready := [path.read_text().split() for path in tmp_path.glob("ready-*")]) < 4 or not all(ready):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    [launcher] = {parent for parent, _ in ready}
    ranks = [Path(f"/proc/{rank}/cmdline") for _, rank in ready]
    assert all(rank.read_bytes() for rank in ranks)
    os.kill(int(launcher), signal.SIGKILL)
    deadline = time.monotonic() + 5
    # A zombie still has its folder in /proc, but no command line.
    while any(rank.exists() and rank.read_bytes() for rank in ranks):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)
