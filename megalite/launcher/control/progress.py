"""The work of this process at this moment, for failure reports and heartbeats: last step, activity, last collective.

A mark is one store of a number into memory, which costs nothing beside a collective. Ranks that a parent started keep
the numbers in a file mapped into memory, so that the parent can read the marks of a rank that was killed. In a traced
step (monitor.trace_steps) each mark has a time stamp too.
"""

import mmap
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from itertools import product
from pathlib import Path
from typing import TypedDict

from megalite.launcher.control.communication import CommunicationTimes
from megalite.launcher.control.step_trace import SpanKind, SpanOf, StepTrace
from megalite.topology.axes import AXES, EXPERT_AXES, ROLES


class Activity(Enum):
    """The phases of a rank's life; the value is the text for people."""

    STARTING = "starting"
    MEETING = "meeting the other ranks"
    PREPARING = "preparing the inputs"
    BUILDING = "building the model"
    LOADING = "loading a checkpoint"
    READING_BATCH = "waiting for the batch"
    FORWARD_BACKWARD = "forward and backward"
    REDUCING = "reducing gradients"
    TOTALLING = "summing the step's totals"
    UPDATING = "updating the weights"
    COMPARING = "comparing the copies of the weights"
    BETWEEN_STEPS = "between two steps"
    PROFILING = "starting or writing the profile"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    EXPORTING = "exporting"
    INFERENCE = "running inference"


class Heartbeat(TypedDict):
    """The progress of a rank as it travels. step: the last finished step, None before the first."""

    step: int | None
    activity: str


_ACTIVITIES = tuple(Activity)
_ACTIVITY_NUMBERS = {activity: number for number, activity in enumerate(_ACTIVITIES)}

_CALLS = (
    "all_reduce",
    "all_gather",
    "all_to_all",
    "rotate",
    "reduce_scatter",
    "broadcast",
    "gather",
    "barrier",
    "send",
    "recv",
)
# "": a group without a role.
_COLLECTIVES = (None, *product(_CALLS, (*AXES, *ROLES, *EXPERT_AXES, "tied", "world", "")))
_COLLECTIVE_NUMBERS = {collective: number for number, collective in enumerate(_COLLECTIVES)}

# The three numbers of a rank; steps are counted from 1, so that 0 means none.
_STEP, _ACTIVITY, _COLLECTIVE = range(3)
_RANK_BYTES = 3 * 8
_UNTRACED = nullcontext()


class Progress:
    """Last finished step, activity and last collective of one rank."""

    def __init__(self) -> None:
        self._numbers = memoryview(bytearray(_RANK_BYTES)).cast("q")
        self.trace: StepTrace | None = None
        self.communication: CommunicationTimes | None = None
        """Adds up the waits of a step; None outside of steps, and in a run of one process."""

    @staticmethod
    def create_file(path: Path, ranks: int) -> None:
        """Create the file in which `ranks` ranks of this machine keep their marks."""
        path.write_bytes(bytes(ranks * _RANK_BYTES))

    @classmethod
    def read(cls, path: Path, local_rank: int) -> "Progress":
        """Return the marks that a rank has left in the file; none if the file cannot be read."""
        progress = cls()
        try:
            content = path.read_bytes()[local_rank * _RANK_BYTES :][:_RANK_BYTES]
            progress._numbers = memoryview(content.ljust(_RANK_BYTES, b"\0")).cast("q")
        except OSError:
            pass
        return progress

    def keep_in(self, path: Path, local_rank: int) -> None:
        """Keep the marks of this process in the file from now on, as the rank with this local rank."""
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        start = local_rank * _RANK_BYTES
        self._numbers = memoryview(mapped)[start : start + _RANK_BYTES].cast("q")

    def restart(self) -> None:
        """Forget all marks: a process may run one job after another."""
        self._numbers[:] = memoryview(bytes(_RANK_BYTES)).cast("q")
        self.trace = self.communication = None

    def finished(self, step: int) -> None:
        """Note the last finished step."""
        self._numbers[_STEP] = step + 1
        self.begin(Activity.BETWEEN_STEPS)

    def begin(self, activity: Activity) -> None:
        """Note what the rank does from now on."""
        self._numbers[_ACTIVITY] = _ACTIVITY_NUMBERS[activity]
        if self.trace is not None:
            self.trace.begin(activity.value)

    def span(self, kind: SpanKind, of: SpanOf) -> AbstractContextManager[None]:
        """Note the time inside of the `with` block in a traced step: that of an action, or of a message's wait."""
        return _UNTRACED if self.trace is None else self.trace.span(kind, of)

    def collective(self, call: str, role: str) -> AbstractContextManager[None]:
        """Note a collective that begins; the result as of `wait`, for one that has ended with the `with` block.

        role: of its group: an axis, a role of topology.axes, "world" or "".
        """
        self._numbers[_COLLECTIVE] = _COLLECTIVE_NUMBERS[call, role]
        return self.wait(role)

    def wait(self, role: str) -> AbstractContextManager[None]:
        """Count the time inside of the `with` block as communication in a group with this role."""
        return _UNTRACED if self.communication is None else self.communication.wait(role)

    @property
    def step(self) -> int | None:
        return self._numbers[_STEP] - 1 if self._numbers[_STEP] else None

    @property
    def activity(self) -> str:
        """The activity and the last collective, for people."""
        activity, last = self.phase, self.last_collective
        return f"{activity}, last collective: {last}" if last else activity

    @property
    def phase(self) -> str:
        return _ACTIVITIES[self._numbers[_ACTIVITY]].value

    @property
    def last_collective(self) -> str:
        """The last collective that began, such as "all_reduce over tp"; "" before the first."""
        collective = _COLLECTIVES[self._numbers[_COLLECTIVE]]
        if collective is None:
            return ""
        call, role = collective
        return f"{call} over {role}" if role else call

    def heartbeat(self) -> Heartbeat:
        return {"step": self.step, "activity": self.activity}


progress = Progress()
"""The marks of this process."""
