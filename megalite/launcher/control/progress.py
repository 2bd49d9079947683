"""The work of this process at this moment, for failure reports and heartbeats: last step, activity, last collective.

A mark is one store of a number into memory, which costs nothing beside a collective. Ranks that a parent started keep
the numbers in a file mapped into memory, so that the parent can read the marks of a rank that was killed. In a traced
step (monitor.trace_steps) each mark has a time stamp too.
"""

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

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
    UPLOADING = "uploading a checkpoint"
    UPDATING = "updating the weights"
    COMPARING = "comparing the copies of the weights"
    BETWEEN_STEPS = "between two steps"
    PROFILING = "starting or writing the profile"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"
    EXPORTING = "exporting"
    INFERENCE = "running inference"


class Heartbeat(TypedDict):
    """The progress of a rank as it travels. step: the last finished step, None before the first. marks: RankMarks."""

    step: int | None
    activity: str
    marks: dict[str, Any]


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
_GROUP_ROLES = (*AXES, *ROLES, *EXPERT_AXES, "tied", "world", "")
_COLLECTIVES = (None, *product(_CALLS, _GROUP_ROLES))
_COLLECTIVE_NUMBERS = {collective: number for number, collective in enumerate(_COLLECTIVES)}

_ROLE_NUMBERS = {role: number for number, role in enumerate(_GROUP_ROLES)}
# The numbers of a rank; steps are counted from 1, so that 0 means none. Then the collectives that began, by role.
_STEP, _ACTIVITY, _COLLECTIVE, _WAITS, _BEATS, _STEPS, _COUNTS = range(7)
_RANK_NUMBERS = _COUNTS + len(_GROUP_ROLES)
_RANK_BYTES = _RANK_NUMBERS * 8
_UNTRACED = nullcontext()


@dataclass(frozen=True)
class RankMarks:
    """The marks of a rank at one moment.

    step: the last finished step. steps: the number of steps that this process has made. waits_over: the role of the
    group that it waits for, in a collective or a message; None: it does not wait. beats: parts of long work that are
    done. counts: role -> the number of collectives that began.
    """

    step: int | None
    phase: str
    collective: str
    waits_over: str | None
    beats: int
    steps: int
    counts: Mapping[str, int]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RankMarks | None":
        """Return the marks that `asdict` has made a table of; None for another table."""
        names = tuple(cls.__dataclass_fields__)
        counts = values.get("counts")
        if set(values) != set(names) or not isinstance(counts, dict):
            return None
        texts = [values["phase"], values["collective"], values["waits_over"] or ""]
        numbers = [values["step"] or 0, values["beats"], values["steps"], *counts.values()]
        right = all(isinstance(each, str) for each in texts) and all(
            isinstance(each, int) for each in numbers
        )
        return cls(**{name: values[name] for name in names}) if right else None

    @property
    def doing(self) -> str:
        """The phase, and the last collective with whether the rank waits in it."""
        if not self.collective:
            return self.phase
        return f"{self.phase}, {'waits in' if self.waits_over is not None else 'last collective:'} {self.collective}"


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

    @classmethod
    def read_marks(cls, path: Path, ranks: int) -> dict[int, RankMarks]:
        """Return the marks that the ranks of this machine have left in the file, by local rank."""
        return {rank: cls.read(path, rank).marks() for rank in range(ranks)}

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
        """Note a step that this process has made."""
        self._numbers[_STEPS] += 1
        self.resumed(step)

    def resumed(self, step: int) -> None:
        """Note the last finished step, which an earlier process may have made."""
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
        numbers = self._numbers
        numbers[_COLLECTIVE] = _COLLECTIVE_NUMBERS[call, role]
        numbers[_COUNTS + _ROLE_NUMBERS[role]] += 1
        return self.wait(role)

    def wait(self, role: str) -> AbstractContextManager[None]:
        """Mark the time inside of the `with` block as waiting for a group with this role, and count it."""
        counted = None if self.communication is None else self.communication.wait(role)
        return _Wait(self._numbers, _ROLE_NUMBERS.get(role, _ROLE_NUMBERS[""]) + 1, counted)

    def beat(self) -> None:
        """Note that a part of a long work is done, such as a batch of a validation."""
        self._numbers[_BEATS] += 1

    def marks(self) -> RankMarks:
        """Return the marks of this moment."""
        waits, counts = self._numbers[_WAITS], self._numbers[_COUNTS:_RANK_NUMBERS].tolist()
        return RankMarks(
            self.step,
            self.phase,
            self.last_collective,
            _GROUP_ROLES[waits - 1] if waits else None,
            self._numbers[_BEATS],
            self._numbers[_STEPS],
            {role: count for role, count in zip(_GROUP_ROLES, counts, strict=True) if count},
        )

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
        return {"step": self.step, "activity": self.activity, "marks": asdict(self.marks())}


class _Wait:
    """A `with` block in which a rank waits."""

    __slots__ = ("_counted", "_numbers", "_role")

    def __init__(self, numbers: memoryview, role: int, counted: AbstractContextManager[None] | None):
        self._numbers, self._role, self._counted = numbers, role, counted

    def __enter__(self) -> None:
        self._numbers[_WAITS] = self._role
        if self._counted is not None:
            self._counted.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._counted is not None:
            self._counted.__exit__(kind, error, traceback)
        self._numbers[_WAITS] = 0


progress = Progress()
"""The marks of this process."""
