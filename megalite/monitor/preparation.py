"""The progress of what is made before training: the tokenizer and the token files; a bar on a terminal, else lines."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from megalite.monitor.work import LINE_SECONDS, is_screen

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


@dataclass(frozen=True)
class PreparationProgress:
    """The progress of tokenizing; bytes are those of the source files on disk."""

    bytes_read: int
    bytes_total: int
    documents: int
    tokens: int


class PreparationConsole:
    """Prints a line when some work begins and when it ends, and shows between them that it goes on.

    stream: default: stdout. On a terminal a bar is redrawn, elsewhere a line appears every 5 seconds.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._started = self._shown = time.monotonic()
        self._title = ""
        self._bar: Bar | None = None

    def begin(self, title: str) -> None:
        """Say at once what begins."""
        self._started = self._shown = time.monotonic()
        self._title = title
        self.note(title)

    def waiting(self) -> None:
        """Show that the work of `begin` goes on."""
        if self._due():
            self.note(f"{self._title}: {time.monotonic() - self._started:.0f} s so far")

    def progress(self, progress: PreparationProgress) -> None:
        """Show how far tokenizing has come."""
        if is_screen(self._stream):
            self._draw(progress)
        elif self._due():
            self.note(self._line(progress))

    def end(self, text: str) -> float:
        """Say what was made; return the seconds since `begin`."""
        seconds = time.monotonic() - self._started
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.note(f"{text} in {seconds:.1f} s")
        return seconds

    def _due(self) -> bool:
        due = time.monotonic() - self._shown >= LINE_SECONDS
        if due:
            self._shown = time.monotonic()
        return due

    def _line(self, progress: PreparationProgress) -> str:
        seconds = time.monotonic() - self._started
        return (
            f"  {progress.bytes_read / 1e6:,.1f} of {megabytes(progress.bytes_total)}, {progress.tokens:,} tokens, "
            f"{progress.tokens / seconds:,.0f} tokens/s"
        )

    def _draw(self, progress: PreparationProgress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            numbers = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s")
            # Redrawn by this thread alone: another one would not survive the fork of the ranks.
            self._bar = Progress(
                BarColumn(),
                DownloadColumn(),
                numbers,
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task("", total=progress.bytes_total, tokens=0, rate=0.0)
        rate = progress.tokens / max(time.monotonic() - self._started, 1e-3)
        self._bar.update(
            self._bar.task_ids[0],
            completed=progress.bytes_read,
            tokens=progress.tokens,
            rate=rate,
            refresh=True,
        )

    def note(self, text: str) -> None:
        """Print a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()


def megabytes(size_bytes: int) -> str:
    """Return a size as text, in MB, or in kB below 0.1 MB."""
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"
