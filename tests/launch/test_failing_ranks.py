"""Ranks under the real torchrun and deepspeed: whose failure is shown, how soon all end, what outlives a launcher."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megalite
from megalite.launcher.process import descendants
from tests.support.jobs import Job, running
from tests.support.waiting import PATIENCE, free_port, soon, wait_until

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


def command_of(launcher: str) -> list[str]:
    """Return the words of a launcher; deepspeed's own port is the same for every job of a machine."""
    [first, second, *rest] = COMMANDS[launcher]
    port = ["--master_port", str(free_port())] if launcher == "deepspeed" else []
    return [sys.executable, first, second, *port, *rest]


@pytest.fixture(params=COMMANDS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator:
    processes: list[subprocess.Popen[str]] = []

    def start_job(behaviour: str) -> subprocess.Popen[str]:
        command = [
            *command_of(request.param),
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
        process.communicate(timeout=PATIENCE)


def test_a_rank_that_fails_alone_is_shown_and_ends_the_others(start):
    process = start("one_raises")
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode != 0
    assert "error: rank 3 (pp 0, dp 0, tp 3) on " in errors
    assert errors.count("ValueError: the moon is in the wrong place") == 1


def test_ranks_die_with_a_killed_launcher(start, tmp_path):
    process = start("wait")
    ready: list[list[str]] = []

    def all_ready() -> bool:
        ready[:] = [path.read_text().split() for path in tmp_path.glob("ready-*")]
        return len(ready) == 4 and all(ready)

    wait_until(all_ready, "not all of 4 ranks are ready", process=process)
    [launcher] = {parent for parent, _ in ready}
    assert len(running([int(rank) for _, rank in ready])) == 4
    os.kill(int(launcher), signal.SIGKILL)
    wait_until(lambda: not running([int(rank) for _, rank in ready]), "ranks outlive their launcher", soon())


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_killed_rank_ends_all_ranks_in_time_and_is_named_once(launcher, tmp_path):
    """A real job. The launchers themselves end up to some seconds later."""
    job, folder = Job.write(tmp_path, tensor=1), tmp_path / "run"
    training = ["megalite", *job.arguments(folder, "--training.steps", "100000")]
    command = ["2" if word == "4" else word for word in command_of(launcher)]
    process = subprocess.Popen(
        [*command, *training],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        metrics = folder / "metrics.jsonl"

        def four_steps() -> bool:
            return metrics.exists() and metrics.read_text().count("\n") >= 4

        wait_until(four_steps, "the job made no four steps", process=process)
        ranks = ranks_below(process.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: not running([*ranks.values()]), "ranks outlive a killed rank", soon(5))
        output = process.communicate(timeout=PATIENCE)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    assert len(re.findall(r"^error: ", output, re.M)) == 1, output
    vanished = (
        rf"vanished \(pid {ranks[1]}.*\n  last seen (after step \d+|before its first step): "  # up to 2 s old
    )
    named = rf"error: rank 1 \(pp 1, dp 0, tp 0\) on \S+: {vanished}"
    assert re.search(named, output), output
    assert "1 other rank stopped because of it" in output


def ranks_below(launcher: int) -> dict[int, int]:
    """Rank -> process of the ranks that a launcher has started."""
    found = {}
    for process in descendants(launcher):
        variables = (Path("/proc") / str(process) / "environ").read_text().split("\0")
        ranks = [each.removeprefix("RANK=") for each in variables if each.startswith("RANK=")]
        if ranks and "megalite train " in (Path("/proc") / str(process) / "cmdline").read_text().replace(
            "\0", " "
        ):
            found[int(ranks[0])] = process
    return found
