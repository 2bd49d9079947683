"""The time that one start of a run has, and whether it is enough for another step and the last checkpoint. No torch."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megalite.config.sections.duration import seconds_of
from megalite.config.sections.schema import RunConfig
from megalite.launcher.rank.allocation import time_left
from megalite.launcher.rank.environment import slurm_variables

# The slowest of these steps counts: data and other jobs slow steps down now and then.
_RECENT_STEPS = 20
# Ranks leave the group, processes end, launchers notice.
MARGIN_SECONDS = 10.0


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock. name: as in "20 s before NAME"."""

    at_seconds: float
    name: str


@dataclass
class TimeBudget:
    """The deadlines of one start of a run, and the measured times from which it decides to stop before them.

    A step is always made first, so that every start of a run makes progress.
    """

    deadlines: Sequence[Deadline] = ()
    clock: Callable[[], float] = time.monotonic
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    _first_step: float | None = None
    _began: float | None = None
    _validation: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether there is a deadline."""
        return bool(self.deadlines)

    @property
    def first(self) -> Deadline:
        """The earliest deadline; there must be one."""
        return min(self.deadlines, key=lambda each: each.at_seconds)

    def begin_step(self) -> None:
        """Note the time at which a step begins."""
        self._began = self.clock()

    def stepped(self, seconds: float) -> None:
        """Record the end of a step. The first one of a start, which may compile, counts only until the second."""
        self._began = None
        if self._first_step is None:
            self._first_step = seconds
        else:
            self._steps.append(seconds)

    def validated(self, seconds: float) -> None:
        """Record a validation; the longest one counts."""
        self._validation = max(self._validation, seconds)

    def reason_to_stop(self, *, save_seconds: float, validates: bool = False) -> str | None:
        """Return "20 s before NAME" if what comes next and the last checkpoint do not fit before the first deadline.

        During a step, the rest of that step must fit too.
        save_seconds: how long the last checkpoint takes. validates: a validation comes next, not a step.
        """
        if not self.deadlines:
            return None
        first = self.first
        now = self.clock()
        done = 0.0 if self._began is None else now - self._began
        step = max(self._steps) if self._steps else self._first_step or done
        rest = 0.0 if self._began is None else max(0.0, step - done)
        left = first.at_seconds - now
        if left > rest + (self._validation if validates else step) + save_seconds + MARGIN_SECONDS:
            return None
        side = "before" if left >= 0 else "after"
        return f"{abs(left):.0f} s {side} {first.name}"


def time_budget(config: RunConfig, started: float, say: Callable[[str], None]) -> TimeBudget:
    """Return the budget of this start: training.stop_after, and the end of the SLURM allocation where there is one.

    started: when this start began, on the monotonic clock. say: called with a line about the earlier deadline.
    """
    deadlines = []
    if (limit := config.training.stop_after) is not None:
        name = f"the end of training.stop_after ({limit if isinstance(limit, str) else f'{limit:g}'})"
        deadlines.append(Deadline(started + seconds_of(limit), name))
    left = time_left(slurm_variables())
    if left.seconds is not None:
        name = f"the end of the allocation at {_clock_time(left.seconds)}"
        deadlines.append(Deadline(time.monotonic() + left.seconds, name))
    if left.note and not deadlines:
        say(
            f"note: the end of the allocation is unknown ({left.note}); training.stop_after can stop the run before it"
        )
    budget = TimeBudget(deadlines)
    if deadlines:
        say(f"time: the run saves and stops before {budget.first.name}")
    return budget


def _clock_time(seconds: float) -> str:
    """Return the local time in some seconds, with the date unless it is today."""
    end = time.localtime(time.time() + seconds)
    today = time.localtime()[:3] == end[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", end)
