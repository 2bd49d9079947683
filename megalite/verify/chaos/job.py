"""One start of a job, as a user types it: the lines that it prints with their times, its ranks, its end."""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from megalite.launcher.process import arguments_of, descendants, die_with_parent, forked_ranks

_END_SECONDS = 10.0


class LaunchedJob:
    """The processes of `megalite train`; the kernel kills them if this process is killed.

    log: the file to which all lines are appended.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path):
        self._lines = deque[tuple[float, str]]()
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def lines(self) -> list[tuple[float, str]]:
        """Return the lines since the last call, each with the second (time.monotonic) in which it came."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._lines.popleft())
        return taken

    def exit_code(self) -> int | None:
        """Return how the job has ended, with all of its lines taken in; None while it runs."""
        if self._process.poll() is None:
            return None
        self._reader.join(_END_SECONDS)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def ranks(self) -> list[int]:
        """Return the processes of the ranks in the order of their numbers; empty while there are none."""
        return forked_ranks(self._process.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started, which passes it on."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all that it has started, and wait for their end."""
        started = [self._process.pid, *descendants(self._process.pid)]
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _END_SECONDS
        while any(_runs(process) for process in started) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _read(self, log: Path) -> None:
        assert self._process.stdout is not None
        try:
            log.touch()
        except OSError:  # a full disk
            log = Path(os.devnull)
        with log.open("ab", buffering=0) as file:
            for line in self._process.stdout:
                self._lines.append((time.monotonic(), line.decode(errors="replace").rstrip("\n")))
                with suppress(OSError):  # a full disk; the job waits where nobody reads
                    file.write(line)


def _runs(process: int) -> bool:
    return bool(arguments_of(process))
