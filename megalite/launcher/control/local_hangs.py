"""Watches the ranks that this process forked for a hang: their marks, and in a hang their stacks and states."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megalite.launcher.control.hang import HangPolicy, HangWatch, own_stacks
from megalite.launcher.control.progress import Progress
from megalite.launcher.process import is_stopped
from megalite.topology.axes import Layout

_STACK_SECONDS = 1.0
_SIGNAL = signal.SIGUSR2
_STOPPED = "its process is stopped (SIGSTOP)"
_POLLED_SECONDS = 0.05


class LocalHangs:
    """The watch over the ranks of a local job. marks: the file of their marks, in a folder of the job's own."""

    def __init__(self, policy: HangPolicy, layout: Layout, marks: Path):
        self.policy, self._layout, self._marks = policy, layout, marks
        self._watch, self._told = HangWatch(layout, policy.seconds), False

    @staticmethod
    def stack_file(marks: Path, rank: int) -> Path:
        return marks.with_name(f"stack-{rank}")

    @classmethod
    def answer(cls, marks: Path, rank: int) -> None:
        """Have this process write its stacks when it is asked, by a thread that holds Python's lock meanwhile.

        A signal handler in native code would read the frames of threads that run, which can crash the process.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})  # threads that start later inherit it
        file = cls.stack_file(marks, rank)
        threading.Thread(target=_answer, args=(file,), name="stacks", daemon=True).start()

    def look(self, pids: Mapping[int, int]) -> tuple[str, bool] | None:
        """Return the report of a hang when it begins to count as one, and again when the job ends for it.

        With whether it ends. pids: rank -> process, of the ranks that run.
        """
        if len(pids) < self._layout.world_size:
            return None  # a rank has ended, and the others follow
        for rank, marks in Progress.read_marks(self._marks, self._layout.world_size).items():
            self._watch.see(rank, marks)
        hang = self._watch.look({rank: _STOPPED for rank, pid in pids.items() if is_stopped(pid)})
        ends = hang is not None and hang.ends(self.policy)
        told, self._told = self._told, hang is not None
        if hang is None or (told and not ends):
            return None
        stacks = self._stacks({rank: pids[rank] for rank in hang.suspects if rank not in hang.mute})
        hosts = dict.fromkeys(pids, socket.gethostname())
        return hang.describe(self._layout, hosts, stacks), ends

    def _stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        for rank, pid in pids.items():
            self.stack_file(self._marks, rank).write_text("")  # those of an earlier hang
            with suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
        until = time.monotonic() + _STACK_SECONDS
        stacks = dict.fromkeys(pids, "")
        while not all(stacks.values()) and time.monotonic() < until:
            time.sleep(_POLLED_SECONDS)
            for rank in pids:
                with suppress(OSError):
                    stacks[rank] = self.stack_file(self._marks, rank).read_text()
        return stacks


def _answer(file: Path) -> None:
    while True:
        signal.sigwait({_SIGNAL})
        partial = file.with_suffix(".partial")
        partial.write_text(own_stacks())
        partial.replace(file)
