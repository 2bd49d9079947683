"""The time in which a rank waits for other ranks during its steps, by kind of communication. No torch.

A wait is the time in which the rank does nothing but communicate: a collective that runs while it computes counts from
the moment in which the rank waits for its end. On an accelerator it is the time of the device's compute stream.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

_KIND_OF_ROLE: Mapping[str, str] = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "tied": "pipeline",
    "ep": "expert",
    "etp": "tensor",
    "edp": "data",
    "dp": "data",
    "batch": "data",
    "loss": "data",
    "dense_gradients": "data",
}
_WORLD = "world"
COMMUNICATION_KINDS = (*dict.fromkeys(_KIND_OF_ROLE.values()), _WORLD)
"""The kinds, each for groups of some roles; "world": the totals of a step, and whatever spans several axes."""


class WaitClock(Protocol):
    """Time stamps of one rank."""

    def stamp(self) -> Any:
        """Return a time stamp."""

    def between(self, start: Any, end: Any) -> float | None:
        """Return the seconds between two stamps; None: the device has not come to the second one."""


class CommunicationTimes:
    """Adds up the waits of one rank."""

    def __init__(self, clock: WaitClock):
        self.clock = clock
        self.waits: list[tuple[str, Any, Any]] = []

    def wait(self, role: str) -> "RankWait":
        """Return the `with` block of a wait. role: of its group, as for a collective."""
        return RankWait(self, _KIND_OF_ROLE.get(role, _WORLD))

    def take(self) -> dict[str, float]:
        """Return kind -> seconds of the waits since the last call that have ended; the others count in the next."""
        seconds = dict.fromkeys(COMMUNICATION_KINDS, 0.0)
        for ended, (kind, start, end) in enumerate(self.waits):
            elapsed = self.clock.between(start, end)
            if elapsed is None:
                del self.waits[:ended]
                return seconds
            seconds[kind] += elapsed
        self.waits.clear()
        return seconds


class RankWait:
    """The time inside of a `with` block."""

    __slots__ = ("_kind", "_start", "_times")

    def __init__(self, times: CommunicationTimes, kind: str):
        self._times, self._kind = times, kind

    def __enter__(self) -> None:
        self._start = self._times.clock.stamp()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._times.waits.append((self._kind, self._start, self._times.clock.stamp()))
