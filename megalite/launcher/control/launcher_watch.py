"""Notices that the launcher of this rank is gone: its process ended, or nobody reads this rank's output any more."""

import os
import select
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from megalite.launcher.process import arguments_of, die_with_parent, parent_of

# These leave their ranks running when they are killed. The kernel kills the ranks then, also a rank that is stopped;
# that is safe because both start ranks from their main thread: the signal comes when the starting thread ends.
_STARTED_BY_MAIN_THREAD = ("torchrun", "deepspeed")
# The parent of a rank that was started by hand is a shell, which may end before it.
_BY_HAND = "the environment"

# The time between two looks at the parent, where the kernel does not tell its end.
_PAUSE_MILLISECONDS = 500


def watch_launcher(launcher: str, gone: Callable[[str], None]) -> None:
    """Call `gone` once, in a thread, with what was noticed when the launcher of this rank is gone.

    Noticed are the end of the parent process, the end of the deepspeed command above it, and that the readers of both
    stdout and stderr are gone (ssh, pdsh). A parent that is unknown, as in a container, is not watched, nor is the
    shell of a rank that was started by hand, nor a pipe that both outputs share (`2>&1 | head`).
    """
    parent = os.getppid()
    if launcher in _STARTED_BY_MAIN_THREAD:
        die_with_parent(parent)
    processes = [] if launcher == _BY_HAND else _launchers(parent)
    outputs = _separate_pipes((1, 2))
    if processes or outputs:
        threading.Thread(
            target=_watch, args=(processes, outputs, gone), name="launcher watch", daemon=True
        ).start()


def _launchers(parent: int) -> list[int]:
    """Return the processes whose end means that the launcher is gone."""
    # 0: the parent is outside of this PID namespace. 1: a container's first process, or the parent is gone already.
    if parent <= 1:
        return []
    above = parent_of(parent)
    return [parent, above] if above > 1 and _is_deepspeed(arguments_of(above)) else [parent]


def _is_deepspeed(arguments: Sequence[str]) -> bool:
    """Whether a command line is that of the deepspeed command, which does not end its ranks when it is killed."""
    program = [Path(each).name for each in arguments[:2]]
    return "deepspeed" in program or "deepspeed.launcher.runner" in arguments[:4]


def _separate_pipes(files: Iterable[int]) -> list[int]:
    """Return these files if they are different pipes or sockets, else none."""
    pipes = []
    for file in files:
        with suppress(OSError):
            status = os.fstat(file)
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                pipes.append((status.st_dev, status.st_ino))
    return list(files) if len(set(pipes)) == 2 else []


def _watch(processes: Sequence[int], outputs: Sequence[int], gone: Callable[[str], None]) -> None:
    poller, watched = select.poll(), _descriptors(processes)
    for file in watched:
        poller.register(file, select.POLLIN)
    reading = set(outputs)
    for file in outputs:
        poller.register(file, 0)  # a pipe without a reader is an error, which is always told
    pause = None if len(watched) == len(processes) else _PAUSE_MILLISECONDS
    while True:
        for file, _ in poller.poll(pause):
            poller.unregister(file)
            reading.discard(file)
            if file in watched:
                gone(f"process {watched[file]} has ended")
                return
        if pause is not None and os.getppid() != processes[0]:
            gone(f"process {processes[0]} has ended")
            return
        if outputs and not reading:
            gone("the readers of stdout and stderr are gone")
            return


def _descriptors(processes: Iterable[int]) -> dict[int, int]:
    """Return descriptor -> process; a descriptor is readable once its process has ended. Needs Linux 5.3."""
    descriptors = {}
    for process in processes:
        with suppress(OSError, AttributeError):
            descriptors[os.pidfd_open(process)] = process
    return descriptors
