"""The process that computes apart from the one that forks ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.launcher.local import LocalStart
from megalite.launcher.rank.detect import RankInfo
from megalite.topology.axes import Layout
from megalite.verify.run import train_ranks
from tests.support.jobs import running
from tests.support.waiting import PATIENCE, wait_until

SCRIPT = """
import os, signal, time
from megalite.verify.run import apart

def work():
    print(os.getpid(), flush=True)
    time.sleep(1000)

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    apart(work)
finally:
    print("tidied", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_alone_ends_what_computes_for_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
        assert process.stdout.read() == ("" if number == signal.SIGKILL else "tidied\n")
        wait_until(lambda: not running([child]), "the child still computes")


def _asks_for_the_end(info: RankInfo, job: SimpleNamespace) -> int:
    if info.rank == 0:
        os.kill(job.command, signal.SIGTERM)
    signal.pause()
    return 0


def test_ranks_that_a_signal_has_ended_are_not_compared(tmp_path: Path) -> None:
    job = SimpleNamespace(config=SimpleNamespace(layout=Layout(data=2)), command=os.getpid())
    with pytest.raises(KeyboardInterrupt):
        train_ranks(_asks_for_the_end, tmp_path, job, LocalStart([]))
