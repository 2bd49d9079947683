"""Waiting for events and for the ends of processes: on a busy machine they are late, and that is no failure."""

import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# No event that a test waits for comes later, however busy the machine is.
PATIENCE = 120.0
# A new interpreter is there in 0.04 s on a quiet machine; one that takes longer than this is on a busy one.
QUIET_START = 0.2
ROOT = Path(__file__).parents[2]


def soon(quiet: float = 4.0) -> float:
    """Return the seconds in which a thing is over that waits for no other: `quiet`, and more if this machine is busy.

    How busy it is shows by the time that a new interpreter takes now.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import megalite.errors"], cwd=ROOT, check=True, timeout=PATIENCE)
    return quiet * max(1.0, (time.monotonic() - began) / QUIET_START)


def wait_until(
    condition: Callable[[], object],
    otherwise: str,
    seconds: float = PATIENCE,
    every: float = 0.01,
    process: "subprocess.Popen[Any] | None" = None,
) -> None:
    """Wait until `condition()` is true; AssertionError with the text `otherwise` after `seconds`.

    process: the one that is to make it true: its end is an AssertionError too, with what it wrote to a pipe.
    """
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            written = "\n".join(str(text) for text in process.communicate(timeout=PATIENCE) if text)
            raise AssertionError(f"{otherwise}: its process ended with code {process.returncode}\n{written}")
        if time.monotonic() > end:
            raise AssertionError(f"{otherwise} (waited {seconds:g} s)")
        time.sleep(every)


def free_port() -> int:
    """Return a port that nobody listens on, below Linux's ephemeral ones: no connection takes it meanwhile."""
    for port in random.sample(range(20000, 30000), 1000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 1,000 ports is free")


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
