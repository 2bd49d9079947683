"""What is said of a run that was told to end: where its last checkpoint is, and how it goes on from there."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megalite.checkpoint.folder import find_latest
from megalite.config.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.environment import RankInfo
from megalite.monitor.console import announce


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


@contextmanager
def termination_raised(info: RankInfo | None, ranks: int) -> Iterator[None]:
    """SIGTERM raises Terminated where this process trains alone; elsewhere others have plans for it."""
    alone = info is None and ranks == 1 and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def tell_interruption(config: RunConfig, info: RankInfo | None) -> None:
    """A line, from one rank."""
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
