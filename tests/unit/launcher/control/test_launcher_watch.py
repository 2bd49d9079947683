"""The end of a launcher is noticed at once, whichever way it shows, and nothing else is taken for it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megalite
from megalite.launcher.control import launcher_watch as watch
from tests.support.jobs import running
from tests.support.waiting import soon, wait_until

ROOT = Path(megalite.__file__).parents[1]

# A rank: says that it is ready, writes what it noticed into the file, and ends.
RANK = """
import os, sys, time
from pathlib import Path
from megalite.launcher.control.launcher_watch import watch_launcher
file, launcher = Path(sys.argv[1]), sys.argv[2]
def gone(why):
    file.with_suffix(".partial").write_text(why)
    file.with_suffix(".partial").rename(file)
    os._exit(3)
watch_launcher(launcher, gone)
file.with_suffix(".made").write_text(f"{os.getpid()} {os.getppid()}")
file.with_suffix(".made").rename(file.with_suffix(".ready"))
time.sleep(600)
"""
# It starts a process and waits for it, as a launcher does.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


class Rank:
    """A rank below a launcher, both with pipes to this process."""

    def __init__(self, folder: Path, launcher: str, *, above: Path | None = None, **outputs: object):
        self.noticed = folder / "noticed"
        command = [sys.executable, "-c", LAUNCHER, "-c", RANK, str(self.noticed), launcher]
        if above is not None:
            above.write_text(LAUNCHER)
            command = [sys.executable, str(above), *command[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **outputs}
        self.started = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)  # type: ignore[call-overload]
        ready = self.noticed.with_suffix(".ready")
        wait_until(ready.exists, "the rank did not start")
        self.pid, self.parent = map(int, ready.read_text().split())

    @property
    def runs(self) -> bool:
        return bool(running([self.pid]))

    def noticed_at_its_end(self) -> str:
        wait_until(lambda: not self.runs, "the rank runs on", soon())
        return self.noticed.read_text() if self.noticed.exists() else ""

    def runs_on(self) -> bool:
        time.sleep(0.15)
        return self.runs and not self.noticed.exists()

    def end(self) -> None:
        os.killpg(self.started.pid, signal.SIGKILL)
        for each in (self.started.stdout, self.started.stderr):
            if each is not None:
                each.close()
        self.started.wait(10)


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Rank] = []

    def start_rank(launcher: str, **options: object) -> Rank:
        started.append(Rank(tmp_path, launcher, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start_rank
    for each in started:
        each.end()


def test_the_end_of_the_parent_is_noticed(start: Start) -> None:
    rank = start("openmpi")
    rank.started.kill()
    assert rank.noticed_at_its_end() == f"process {rank.parent} has ended"


def test_the_kernel_ends_even_a_stopped_rank_of_torchrun(start: Start) -> None:
    rank = start("torchrun")
    os.kill(rank.pid, signal.SIGSTOP)
    rank.started.kill()
    assert rank.noticed_at_its_end() == ""


def test_the_end_of_the_deepspeed_command_above_its_launcher_is_noticed(start: Start, tmp_path: Path) -> None:
    rank = start("openmpi", above=tmp_path / "deepspeed")
    assert rank.parent != rank.started.pid
    rank.started.kill()
    assert rank.noticed_at_its_end() == f"process {rank.started.pid} has ended"


def test_another_command_above_the_launcher_may_end(start: Start, tmp_path: Path) -> None:
    rank = start("openmpi", above=tmp_path / "wrapper")
    rank.started.kill()
    assert rank.runs_on()


def test_readers_are_gone_once_both_pipes_are_closed(start: Start) -> None:
    rank = start("openmpi")
    assert rank.started.stdout is not None and rank.started.stderr is not None
    rank.started.stdout.close()
    assert rank.runs_on()
    rank.started.stderr.close()
    assert rank.noticed_at_its_end() == "the readers of stdout and stderr are gone"


def test_one_pipe_for_both_outputs_may_close(start: Start) -> None:
    """As `megalite train run.toml 2>&1 | head` does."""
    rank = start("openmpi", stderr=subprocess.STDOUT)
    assert rank.started.stdout is not None
    rank.started.stdout.close()
    assert rank.runs_on()


def test_a_rank_started_by_hand_outlives_its_shell(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        rank = start("the environment", stdout=log, stderr=log)
    os.kill(rank.parent, signal.SIGKILL)
    assert rank.runs_on()


def test_without_descriptors_of_processes_the_parent_is_looked_at(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Linux before 5.3 and on macOS."""
    monkeypatch.setattr(watch, "_PAUSE_MILLISECONDS", 10)
    monkeypatch.delattr(os, "pidfd_open")
    parents = [os.getpid()]  # a process that runs, and not 1, which this one may be below
    monkeypatch.setattr(os, "getppid", lambda: parents[-1])
    seen: list[str] = []
    watch.watch_launcher("openmpi", seen.append)
    time.sleep(0.05)
    assert not seen
    parents.append(1)
    wait_until(lambda: seen, "the end was not noticed")
    assert seen == [f"process {parents[0]} has ended"]


@pytest.mark.parametrize("parent", [0, 1])
def test_an_unknown_parent_is_not_watched(parent: int) -> None:
    """0: it is outside of the PID namespace; 1: the first process of a container."""
    assert watch._launchers(parent) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/venv/bin/python", "/venv/bin/deepspeed", "--hostfile", "h", "train.py"], True),
        (["python", "-m", "deepspeed.launcher.runner", "train.py"], True),
        (["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=..."], False),
        (["bash", "-c", "deepspeed train.py"], False),
        ([], False),
    ],
)
def test_the_deepspeed_command_is_told_by_its_command_line(arguments: list[str], expected: bool) -> None:
    assert watch._is_deepspeed(arguments) is expected
