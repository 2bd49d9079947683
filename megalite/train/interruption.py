"""SIGTERM: the run saves a checkpoint before it ends, and says how to resume."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megalite.checkpoint.folder import find_latest
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.detect import RankInfo
from megalite.monitor.console import announce

# A signal may arrive twice at once: by the process group and from the parent, which passes it on.
_ONCE_SECONDS = 1.0
# launch/slurm.sbatch has 300 between SIGTERM and the end of the time.
_GRACE_SECONDS = 240.0


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


@contextmanager
def termination_raised(info: RankInfo | None, ranks: int) -> Iterator[None]:
    """Let SIGTERM raise Terminated where this process is the only rank; a launcher handles it elsewhere."""
    alone = info is None and ranks == 1 and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def termination_noted(ended: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM has arrived, to be asked between two steps; main thread only.

    `ended` is told why, and ends the process, in a thread: when the signal comes again, a second later or more, or when
    the run is not over within the grace time. An earlier handler of the signal stays in place.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _raise):
        yield lambda: False
        return
    noted = threading.Event()
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    # By its number in a pipe: that arrives where the main thread hangs in a collective, and runs no Python code.
    previous_sender = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    # Not every library goes on with a system call that was cut short.
    signal.siginterrupt(signal.SIGTERM, False)
    watch = threading.Thread(target=_watch, args=(receiver, noted, ended), name="SIGTERM", daemon=True)
    watch.start()
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGTERM, previous)
        signal.set_wakeup_fd(previous_sender)
        os.close(sender)
        watch.join()
        os.close(receiver)


def _watch(receiver: int, noted: threading.Event, ended: Callable[[str], None]) -> None:
    first: float | None = None
    while True:
        left = None if first is None else max(0.0, first + _GRACE_SECONDS - time.monotonic())
        if not select.select([receiver], [], [], left)[0]:
            ended(f"the run was not over {_GRACE_SECONDS:g} s after SIGTERM")
            return
        numbers = os.read(receiver, 4096)
        if not numbers:
            return
        if signal.SIGTERM not in numbers:
            continue
        if first is None:
            first = time.monotonic()
            noted.set()
        elif time.monotonic() - first >= _ONCE_SECONDS:
            ended("SIGTERM came again")
            return


def tell_interruption(config: RunConfig, info: RankInfo | None) -> None:
    """Announce, from rank 0, what is saved and how to resume."""
    if info is None or info.rank == 0:
        announce(f"interrupted: {_what_is_left(config)}")


def _what_is_left(config: RunConfig) -> str:
    folder = Path(config.run.folder) / "checkpoints"
    try:
        last = find_latest(folder)
    except CheckpointError as error:
        return str(error)
    again = "the same command" if config.checkpoint.resume == "auto" else 'checkpoint.resume = "auto"'
    if last is None:
        return f"{folder} has no checkpoint yet; the same command begins anew"
    return f"the last checkpoint is {last}; {again} goes on from there"


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated
