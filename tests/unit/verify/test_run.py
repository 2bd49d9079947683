"""The process that computes apart from the one that forks ranks."""

import signal
import subprocess
import sys

import pytest

from tests.support.jobs import running
from tests.support.waiting import PATIENCE, wait_until

SCRIPT = """
import os, signal, time
from megalite.verify.run import apart

def work():
    print(os.getpid(), flush=True)
    time.sleep(1000)

signal.signal(signal.SIGINT, signal.default_int_handler)
apart(work)
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
        wait_until(lambda: not running([child]), "the child still computes")
