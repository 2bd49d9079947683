"""The ordered map: order, bounded lead, failures, and that no process stays behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from megalite.data.files.workers import ordered_map
from megalite.errors import DataError
from tests.support.jobs import running
from tests.support.waiting import PATIENCE, wait_until


def square_later(number: int) -> int:
    """The first of every four takes longest."""
    time.sleep(0.02 if number % 4 == 0 else 0)
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise DataError("three is bad")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def process_of(_: int) -> int:
    return os.getpid()


def big(number: int) -> bytes:
    return bytes(number)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order(workers: int) -> None:
    assert list(ordered_map(square_later, range(40), workers=workers)) == [n * n for n in range(40)]


def test_fewer_items_than_workers() -> None:
    assert list(ordered_map(square_later, [], workers=2)) == []
    assert list(ordered_map(square_later, [5], workers=2)) == [25]


def test_results_larger_than_a_pipe_do_not_deadlock() -> None:
    sizes = [3_000_000] * 12
    assert [len(result) for result in ordered_map(big, sizes, workers=2)] == sizes


def test_items_are_taken_only_a_little_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield taken

    results = ordered_map(fail_at_three, filter(lambda number: number != 3, items()), workers=2)
    next(results)
    assert taken < 20
    results.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_is_raised_here(workers: int) -> None:
    with pytest.raises(DataError, match="three is bad"):
        list(ordered_map(fail_at_three, range(10), workers=workers))


def test_a_killed_worker_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match=r"worker process died \(killed by signal 9\); if memory ran out"):
        list(ordered_map(die_at_three, range(10), workers=2))


def test_no_worker_outlives_the_map() -> None:
    pids = set(ordered_map(process_of, range(10), workers=2))
    assert os.getpid() not in pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from tests.unit.data.files.test_workers import ordered_map, process_of\n"
        "if __name__ == '__main__':\n"
        "    pids = ordered_map(process_of, range(1000000), workers=2)\n"
        "    print(*{next(pids) for _ in range(50)}, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[4]
    parent = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert pids
    wait_until(lambda: not running(pids), "workers outlive their parent")


def test_a_script_is_not_run_again_in_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.unit.data.files.test_workers import process_of\n"
        "from megalite.data.files.workers import ordered_map\n"
        "print(len(set(ordered_map(process_of, range(4), workers=1))))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    ran = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr


STARTED = """
import os, signal, subprocess
from megalite.data.files.workers import ordered_map
from tests.unit.data.files.test_workers import process_of

start = subprocess.Popen.__init__

def start_and_signal(self, *arguments, **settings):
    start(self, *arguments, **settings)
    os.kill({process}, signal.{name})

subprocess.Popen.__init__ = start_and_signal
print(len(set(ordered_map(process_of, range(4), workers=1))))
"""


@pytest.mark.parametrize(
    ("process", "name", "code", "said"),
    [("self.pid", "SIGINT", 0, "1\n"), ("os.getpid()", "SIGKILL", -signal.SIGKILL, "")],
    ids=["interrupted", "left alone"],
)
def test_a_worker_that_still_starts_says_nothing(process: str, name: str, code: int, said: str) -> None:
    """Ctrl-C reaches it before its first line of Python, or its parent is gone by then."""
    ran = subprocess.run(
        [sys.executable, "-c", STARTED.format(process=process, name=name)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,  # until the worker has closed its end too
        text=True,
        timeout=PATIENCE,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, said, "")


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\x10\0", b"\0\0\x10\0half"])
def test_a_worker_says_nothing_when_its_parent_leaves_within_a_message(sent: bytes) -> None:
    """Ctrl-C ends a parent that is writing a piece of text to the pipe."""
    ours, theirs = Pipe()
    handle = theirs.fileno()
    code = f"from megalite.data.files.workers import serve; serve({handle})"
    worker = subprocess.Popen([sys.executable, "-c", code], pass_fds=(handle,), stderr=subprocess.PIPE)
    theirs.close()
    ours.send(process_of)
    os.write(ours.fileno(), sent)
    ours.close()
    _, said = worker.communicate(timeout=PATIENCE)
    assert (worker.returncode, said) == (0, b"")
