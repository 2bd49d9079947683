"""Waits of the host for the device: counted by kind and calling line, or refused."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.support.standin.device import use_standin

HERE = str(Path(__file__).parent)
ROOT = Path(__file__).parents[3]
# Autograd's own thread runs the operator, without a Python frame above.
NOWHERE = "autograd"
_watchers: list[Callable[[str], None]] = []


@dataclass
class Syncs:
    """Counts of waits. kinds: "item", "copy to host", "copy to device", "data-dependent", "event", "stream", "device",
    "barrier".

    lines: (kind, "megalite/..py:line") -> count.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kinds.total()

    def add(self, kind: str) -> None:
        self.kinds[kind] += 1
        self.lines[kind, asking_line()] += 1

    def __str__(self) -> str:
        return "\n".join(f"{count} x {kind} at {line}" for (kind, line), count in self.lines.most_common())


class SyncRefused(RuntimeError):
    """The host would have waited for the device."""


def asking_line() -> str:
    """Return the innermost line of megalite on the stack; else the innermost of this repository; else "autograd"."""
    frame: FrameType | None = sys._getframe(1)
    nearest = NOWHERE
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts
        if ours and not str(file).startswith(HERE):
            line = f"{file.relative_to(ROOT)}:{frame.f_lineno}"
            if line.startswith("megalite/"):
                return line
            nearest = line if nearest == NOWHERE else nearest
        frame = frame.f_back
    return nearest


@contextmanager
def count_syncs() -> Iterator[Syncs]:
    """Count the host's waits for the device within the context."""
    syncs = Syncs()
    with _watching(syncs.add):
        yield syncs


@contextmanager
def refuse_syncs() -> Iterator[None]:
    """Raise SyncRefused where the host would wait, like torch.cuda.set_sync_debug_mode("error")."""

    def refuse(kind: str) -> None:
        raise SyncRefused(f"the host waits for the device ({kind}) at {asking_line()}")

    with _watching(refuse):
        yield


@contextmanager
def _watching(watcher: Callable[[str], None]) -> Iterator[None]:
    compiled = use_standin()
    _watchers.append(watcher)
    compiled.watch(_tell)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            compiled.watch(None)


def _tell(kind: str) -> None:
    for watcher in list(_watchers):
        watcher(kind)
