"""Shows that a long phase goes on: one line that is redrawn on a terminal, elsewhere a line every 5 seconds."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TextIO

from megalite.launcher.control.progress import progress

REDRAW_SECONDS, LINE_SECONDS = 0.25, 5.0
_ERASE = "\r\x1b[2K"


def _nothing(*_: object) -> None:
    pass


class Work:
    """A phase while it lasts; a thread draws it, so that one long call is shown too.

    title: what is done, such as "validating". total: how many `unit` it has, None: unknown. draw: shows a text, every
    `seconds`. Used as a context manager by the one process that prints, which must not fork meanwhile.
    """

    def __init__(
        self,
        title: str,
        *,
        draw: Callable[[str], None],
        seconds: float,
        unit: str = "",
        total: int | None = None,
        erase: Callable[[], None] = _nothing,
    ):
        self._title, self._unit, self._total = title, unit, total
        self._draw, self._erase, self._seconds = draw, erase, seconds
        self._done = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def __enter__(self) -> "Work":
        self._began = time.monotonic()
        if self._seconds:
            self._thread = threading.Thread(target=self._watch, name=f"work: {self._title}", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def advance(self, count: int = 1) -> None:
        """Note that `count` more are done."""
        self._done += count
        progress.beat()

    def text(self) -> str:
        """Return what is shown now."""
        seconds, done = time.monotonic() - self._began, self._done
        if not self._unit:
            return f"{self._title}: {seconds:.0f} s so far"
        text = f"{self._title}: {done:,}" + (f" of {self._total:,}" if self._total else "") + f" {self._unit}"
        if self._total and done:
            return f"{text}, {duration(seconds * (self._total - done) / done)} left"
        return f"{text}, {seconds:.0f} s so far"

    def _watch(self) -> None:
        drawn = False
        while not self._ended.wait(self._seconds):
            self._draw(self.text())
            drawn = True
        if drawn:
            self._erase()


def working(
    title: str,
    *,
    unit: str = "",
    total: int | None = None,
    shown: bool = True,
    stream: TextIO | None = None,
) -> Work:
    """Return a phase that is shown on `stream` (default: stderr), if this process is the one to show it."""
    file = stream or sys.stderr
    if not shown:
        return Work(title, draw=_nothing, seconds=0)
    screen = is_screen(file)

    def draw(text: str) -> None:
        # A line that wraps could not be erased.
        file.write(f"{_ERASE}{text[: shutil.get_terminal_size().columns - 1]}" if screen else f"{text}\n")
        file.flush()

    seconds, erase = (REDRAW_SECONDS, partial(draw, "")) if screen else (LINE_SECONDS, _nothing)
    return Work(title, draw=draw, seconds=seconds, unit=unit, total=total, erase=erase)


def is_screen(stream: TextIO) -> bool:
    """Return whether a bar can be drawn on `stream`: a terminal that has a size.

    Open MPI gives its ranks a pseudo-terminal, without a size where its own output goes to a file.
    """
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True  # a stream without a file, such as a notebook's, has no size to ask for


def duration(seconds: float) -> str:
    """Return a duration as text: 1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
