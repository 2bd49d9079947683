"""Waiting for events and for the ends of processes: on a busy machine they are late, and that is no failure."""

import time
from collections.abc import Callable
from pathlib import Path

# No event that a test waits for comes later, however busy the machine is.
PATIENCE = 120.0
# The longest that a thing may take which must not wait for another: a second at most on a quiet machine, and far below
# the minutes that the other would take.
SOON = 30.0


def wait_until(
    condition: Callable[[], object], otherwise: str, seconds: float = PATIENCE, every: float = 0.01
) -> None:
    """Wait until `condition()` is true; AssertionError with the text `otherwise` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{otherwise} (waited {seconds:g} s)")
        time.sleep(every)


def processes_with(variable: str) -> list[int]:
    """Return the processes that have `NAME=value` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
