"""Waits that end with their process, and the bound of what must end soon, which grows with the load of the machine."""

import socket
import subprocess
import sys
import time

import pytest

from tests.support.waiting import QUIET_START, free_port, soon, wait_until


@pytest.mark.parametrize(("start", "factor"), [(0.0, 1.0), (4 * QUIET_START, 4.0)])
def test_the_bound_is_that_of_a_quiet_machine_times_the_slowness_of_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch, start: float, factor: float
) -> None:
    clock = iter([100.0, 100.0 + start])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert round(soon(3), 6) == 3 * factor


def test_the_bound_is_taken_of_an_interpreter_that_starts() -> None:
    began = time.monotonic()
    bound = soon(QUIET_START)
    assert QUIET_START <= bound <= max(QUIET_START, time.monotonic() - began)


def test_the_end_of_the_process_that_is_waited_for_ends_the_wait() -> None:
    program = "print('because'); raise SystemExit(7)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"^nothing: its process ended with code 7\nbecause\n$"):
        wait_until(lambda: False, "nothing", process=process)
    wait_until(lambda: True, "nothing", process=process)


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass
