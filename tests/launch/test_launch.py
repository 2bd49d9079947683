"""megalite launch with toy ranks on this machine: how jobs end, how soon, with which words, and what runs on.

The ranks are real processes of real launchers that join the real coordinator, without torch. `ssh` is a stand-in that
runs its command here.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megalite
from tests.cli.test_launch_cli import RUN
from tests.support.waiting import PATIENCE, processes_with, soon, wait_until

pytestmark = pytest.mark.extended

ROOT = Path(megalite.__file__).parents[1]
MARK = "MEGALITE_TEST_JOB"
# `train` is a toy rank; all other commands are the real ones. A toy "alone ..." is a real rank up to its training.
MAIN = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[1] != "train" or os.environ["TOY"].startswith("alone"):
    import types
    from megalite.cli import main
    from megalite.errors import DataError

    def train_rank(info, job, signals, meeting):
        toy, place = os.environ["TOY"], Path(os.environ["TOY_FOLDER"])
        if "trains" in toy:
            signals.first_step_over()
        (place / "ready-0").touch()
        if "dies" in toy:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fails" in toy:
            raise DataError("the text is gone")
        while "succeeds" not in toy and not signals():
            time.sleep(0.05)
        return 75 if signals() else 0

    sys.modules["megalite.train.rank"] = types.SimpleNamespace(train_rank=train_rank, RankJob=lambda *job: job)
    sys.exit(main())
from megalite.launcher.rank.detect import rank_info
from megalite.launcher.control.connection import DEFAULT_LIMITS
from megalite.launcher.control.member import Member, RankCalls
from megalite.launcher.control.messages import Hello
info, toy, place = rank_info(), os.environ["TOY"], Path(os.environ["TOY_FOLDER"])
if toy == "exits early" and info.rank == 3:
    sys.exit(7)
if toy == "is late" and info.rank == 3:
    (place / "late").touch()
    time.sleep(600)
address, nonce = os.environ["MEGALITE_COORDINATOR"].split("/")
host, port = address.rsplit(":", 1)
member = Member.join(
    lambda: (host, int(port), nonce), Hello(info.rank, info.world_size, info.node, os.getpid()), DEFAULT_LIMITS,
    RankCalls(
        progress=lambda: {"step": 5, "activity": "computing"}, ended=lambda verdict: os._exit(verdict.exit_code)
    ),
)
def say(line):
    # One write: an unbuffered print makes two, and lines of ranks mix.
    os.write(1, f"rank {info.rank} {line}\\n".encode())
say(f"of {info.world_size} is here: {sys.argv[2:]}")
member.agree("here", {}, "")
signals = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, frame: signals.append(number))
(place / f"ready-{info.rank}").write_text(str(os.getpid()))
if toy == "dies" and info.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
while toy == "is deaf" or (toy != "succeeds" and not signals):
    time.sleep(0.05)
if signals:
    say(f"got {signal.Signals(signals[0]).name}")
member.leave(75 if signals else 0)
"""
SSH = """#!/usr/bin/env python3
import os, subprocess, sys
sys.exit(subprocess.call(["sh", "-c", sys.argv[-1]]))
"""


class Launched:
    """One `megalite launch`, and every process that descends from it, told by a variable that all inherit."""

    def __init__(self, folder: Path, toy: str, *arguments: str, stdout: int = subprocess.PIPE):
        self.folder, self.mark, self.started = folder, uuid.uuid4().hex, time.monotonic()
        environ = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TOY": toy,
            "TOY_FOLDER": str(folder),
            MARK: self.mark,
        }
        exports = [word for name in ("TOY", "TOY_FOLDER", MARK) for word in ("--export", name)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megalite", "launch", "run.toml", "--no-preflight", *exports, *arguments],
            cwd=folder,
            env=environ,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self, ranks: int = 4) -> None:
        self.wait_until(
            lambda: len(list(self.folder.glob("ready-*"))) >= ranks, f"not all of {ranks} ranks are ready"
        )

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for a thing that happens before the job ends."""

        def happened() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return condition()

        wait_until(happened, otherwise)

    def send(self, number: int, ranks: int = 4) -> None:
        """Send a signal to the launching process alone, and begin to count the time."""
        self.wait_until_ready(ranks)
        time.sleep(0.3)
        self.started = time.monotonic()
        self.process.send_signal(number)

    def finish(self) -> tuple[int, list[str], float]:
        """Return exit code, output, and the seconds it took since `started`."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output.splitlines(), time.monotonic() - self.started

    def left_running(self) -> list[int]:
        return processes_with(f"{MARK}={self.mark}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    package = tmp_path / "megalite"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__.append({str(ROOT / 'megalite')!r})\n")
    (package / "__main__.py").write_text(MAIN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=2\n")
    jobs: list[Launched] = []

    def start_job(backend: str, toy: str, *flags: str, stdout: int = subprocess.PIPE) -> Launched:
        hosts = ["--hostfile", "hosts"] if backend == "ssh" else []
        if backend.startswith("mpirun"):
            program = shutil.which(backend)
            if program is None:
                pytest.skip(f"no {backend} here")
            # A script, not a link: MPICH looks for its proxy beside the program.
            (tmp_path / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (tmp_path / "bin" / "mpirun").chmod(0o755)
        words = ["--backend", backend.split(".")[0], *hosts, *flags]
        jobs.append(Launched(tmp_path, toy, *words, stdout=stdout))
        return jobs[-1]

    yield start_job
    left = [pid for job in jobs for pid in job.left_running()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


BACKENDS = ["ssh", "mpirun.openmpi", "mpirun.mpich", "torchrun"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_comes_and_the_job_ends_well(start, backend):
    code, output, _ = start(backend, "succeeds").finish()
    assert code == 0, output
    here = sorted(line for line in output if " is here: " in line)
    assert here == [f"rank {rank} of 4 is here: ['run.toml']" for rank in range(4)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_the_last_word_and_ends_all(start, backend):
    job = start(backend, "dies")
    code, output, _ = job.finish()
    assert code == 1, output
    last = "\n".join(output[-4:])
    assert "error: rank 3" in last and "localhost" not in output[-1].split("error")[0], output
    assert sum(line.startswith("error: ") for line in output) == 1, output


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_ends_before_it_comes_is_told(start, backend):
    if backend == "mpirun.mpich":
        pytest.skip("MPICH leaves the others alone: they wait for launch.rendezvous_seconds")
    code, output, seconds = start(backend, "exits early").finish()
    assert code == 1 and seconds < soon(40), output
    last = "\n".join(output[-3:])
    assert "error: " in last and re.search(r"ranks? .*3 on hosts? .*did not come", last), output


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda each: each.name
)
@pytest.mark.parametrize("backend", [*BACKENDS, "deepspeed"])
def test_a_signal_reaches_every_rank_and_75_stays_75(start, backend, number):
    """A plain `deepspeed` that gets SIGTERM passes it on to the first rank of each host alone."""
    if number != signal.SIGTERM and backend != "ssh":
        pytest.skip("one backend shows it")
    job = start(backend, "waits")
    job.send(number)
    code, output, seconds = job.finish()
    # A launcher that took a rank for lost would wait a minute for it.
    assert code == 75 and seconds < soon(30), output
    got = sorted(line for line in output if " got " in line)
    assert got == [f"rank {rank} got {number.name}" for rank in range(4)]


@pytest.mark.parametrize(("output", "told"), [("pipe", "SIGHUP"), ("log", "SIGTERM")])
def test_ranks_print_on_behind_a_closed_terminal_where_the_output_is_a_log(start, tmp_path, output, told):
    """After SIGHUP a rank drops what it prints, since the ssh that it prints through has lost the terminal."""
    with (tmp_path / "log").open("w") as log:
        job = start("ssh", "waits", stdout=log.fileno() if output == "log" else subprocess.PIPE)
    job.send(signal.SIGHUP)
    code, lines, _ = job.finish() if output == "pipe" else (job.process.wait(PATIENCE), [], 0)
    lines = lines or (tmp_path / "log").read_text().splitlines()
    got = sorted(line for line in lines if " got " in line)
    assert (code, got) == (75, [f"rank {rank} got {told}" for rank in range(4)])
    assert (f"{told} is passed on to all ranks" in lines) is (output == "log")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_runs_on_when_the_launching_process_is_killed(start, backend):
    job = start(backend, "waits")
    job.send(signal.SIGKILL)
    job.process.wait(PATIENCE)
    wait_until(lambda: not job.left_running(), "ranks outlive it", soon(10))


def test_a_second_interrupt_ends_a_job_that_does_not_heed_the_first(start):
    job = start("ssh", "is deaf")
    job.send(signal.SIGINT)
    time.sleep(1)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    code, output, seconds = job.finish()
    assert code == 130 and seconds < soon(10), output
    assert output[-1] == "error: the job was interrupted twice"


def test_sigterm_before_all_ranks_are_here_loses_nothing(start, tmp_path):
    job = start("ssh", "is late")
    job.wait_until((tmp_path / "late").exists, "no rank came late")
    job.process.terminate()
    code, output, _ = job.finish()
    assert code == 76 and output[-1] == "error: SIGTERM came before all ranks were here", output


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (255, "error: ssh: the command for localhost ended with exit code 255"),
        # DeepSpeed: a # in its file of variables leaves the remote command out, and the job ends with 0.
        (0, "error: ssh ended, but not all ranks ended in good order"),
    ],
)
def test_a_command_that_starts_no_rank_is_a_failure(start, tmp_path, ended, cause):
    (tmp_path / "bin" / "ssh").write_text(f"#!/bin/sh\nexit {ended}\n")
    code, output, _ = start("ssh", "succeeds").finish()
    assert code == 1
    assert output[-1].startswith(cause), output
    assert output[-1].endswith("; ranks 0-3 on hosts localhost, 127.0.0.1 did not come")


ALONE = ("--parallel.tensor", "1", "--parallel.pipeline", "1", "--parallel.data", "1")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_of_one_rank_ends_well(start, backend):
    code, output, _ = start(backend, "alone, succeeds", *ALONE).finish()
    assert code == 0 and "all ranks are here" in "\n".join(output), output
    assert output[0].startswith("1 rank: tensor 1"), output


@pytest.mark.parametrize(
    ("toy", "number", "expected"),
    [
        ("alone, trains", signal.SIGTERM, 75),
        ("alone, trains", signal.SIGINT, 75),
        ("alone, begins", signal.SIGTERM, 76),
        ("alone, begins", signal.SIGINT, 130),
    ],
)
def test_a_signal_stops_a_job_of_one_rank(start, toy, number, expected):
    job = start("ssh", toy, *ALONE)
    job.send(number, ranks=1)
    code, output, seconds = job.finish()
    assert code == expected and seconds < soon(10), output
    assert ("there is nothing to save" in "\n".join(output)) is ("begins" in toy), output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("toy", "expected", "cause"),
    [("alone, fails", 2, "error: the text is gone"), ("alone, dies", 1, "error: rank 0 .*vanished")],
)
def test_the_failure_of_a_single_rank_is_the_last_word(start, backend, toy, expected, cause):
    code, output, seconds = start(backend, toy, *ALONE).finish()
    assert code == expected and seconds < soon(40), output
    assert sum(line.startswith("error: ") for line in output) == 1, output
    assert re.match(cause, next(line for line in output if line.startswith("error: "))), output


def test_a_single_rank_with_wrong_settings_is_the_last_word(start, tmp_path):
    """The run file of the rank's host differs from that of the launching process."""
    (tmp_path / "bin" / "ssh").write_text(
        SSH.replace("import os", "import pathlib; CHANGE; import os", 1).replace(
            "CHANGE", "pathlib.Path('run.toml').write_text('[model]\\nlayers = 3\\n')"
        )
    )
    code, output, _ = start("ssh", "alone, succeeds", *ALONE).finish()
    assert code == 2 and "model.layers: unknown key" in "\n".join(output[-5:]), output
    assert sum(line.startswith("error: ") for line in output) == 1, output
