"""The load beside which tests are shown to wait for events."""

import subprocess
import sys
from pathlib import Path

from tests.support.jobs import running
from tests.support.load import load
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


def ticks(process: int) -> int:
    """Return the processor time that a process has used, in the kernel's ticks."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11])


def test_each_process_computes_inside_of_the_block_only() -> None:
    with load(2) as busy:
        for process in busy:
            wait_until(lambda process=process: ticks(process) >= 2, "it does not compute")
    assert len(busy) == 2 and not running(busy)


def test_a_command_beside_it_gives_its_exit_code() -> None:
    command = [sys.executable, "-m", "tests.support.load", "1", "sh", "-c", "exit 7"]
    assert subprocess.call(command, cwd=ROOT) == 7
