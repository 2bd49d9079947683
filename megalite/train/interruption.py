"""SIGTERM and Ctrl-C: the run saves a checkpoint before it ends, and says how to resume."""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megalite.checkpoint.folder import find_latest
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.detect import RankInfo
from megalite.launcher.local import SAME_PRESS_SECONDS
from megalite.monitor.console import announce

# Ctrl-C first: a launcher may send both.
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# A launcher passes a signal on that SLURM or the terminal has sent to each rank already; deepspeed sends SIGTERM then.
_PASSED_ON_SECONDS = 1.0
# launch/slurm.sbatch has 300 between SIGTERM and the end of the time.
_GRACE_SECONDS = 240.0


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated


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


# The handlers that a run replaces; any other is the user's.
_REPLACED: dict[signal.Signals, tuple[object, ...]] = {
    signal.SIGTERM: (signal.SIG_DFL, _raise),
    signal.SIGINT: (signal.default_int_handler,),
}


@contextmanager
def interruption_noted(
    told: Callable[[str], None], ended: Callable[[str, signal.Signals], None], *, launched: bool = False
) -> Iterator[Callable[[], signal.Signals | None]]:
    """Yield a function that returns SIGTERM or SIGINT once one has arrived, to be asked between two steps.

    told: called with a line for the user when the first signal arrives. ended: called with the reason and the first
    signal, to end the process, when a signal comes again later, or when the run is not over within the grace time.
    Both are called in a thread, since the main one may wait for other ranks for ever. launched: a launcher started
    this rank. A signal that the user handles or ignores is left alone; so are both outside of the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handlers in _REPLACED.items() if signal.getsignal(number) in handlers]
    if not in_main or not ours:
        yield lambda: None
        return
    noted: list[signal.Signals] = []
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    # By its number in a pipe: that arrives where the main thread hangs in a collective, and runs no Python code.
    previous_sender = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in ours}
    for number in ours:
        # Not every library goes on with a system call that was cut short.
        signal.siginterrupt(number, False)
    watch = threading.Thread(
        target=_watch, args=(receiver, ours, noted, told, ended, launched), name="signals", daemon=True
    )
    watch.start()
    try:
        yield lambda: noted[0] if noted else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_sender)
        os.close(sender)
        watch.join()
        os.close(receiver)


def _watch(
    receiver: int,
    ours: Collection[int],
    noted: list[signal.Signals],
    told: Callable[[str], None],
    ended: Callable[[str, signal.Signals], None],
    launched: bool,
) -> None:
    first = math.inf
    while True:
        left = max(0.0, first + _GRACE_SECONDS - time.monotonic()) if noted else None
        if not select.select([receiver], [], [], left)[0]:
            ended(f"the run was not over {_GRACE_SECONDS:g} s after {NAMES[noted[0]]}", noted[0])
            return
        numbers = os.read(receiver, 4096)
        if not numbers:
            return
        arrived = [signal.Signals(number) for number in numbers if number in ours]
        if not arrived:
            continue
        if not noted:
            first = time.monotonic()
            noted.append(arrived[0])
            name = NAMES[noted[0]]
            told(f"{name}: the run saves and ends after this step; a second {name} ends it at once")
            continue
        pressed = arrived[0] is signal.SIGINT and not launched
        if time.monotonic() - first >= (SAME_PRESS_SECONDS if pressed else _PASSED_ON_SECONDS):
            ended(f"{NAMES[arrived[0]]} came again", noted[0])
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
        return f"{folder} has no checkpoint yet; the same command starts from the beginning"
    return f"the last checkpoint is {last}; {again} resumes from it"
