"""The trace of one step on one rank: time stamps of its phases, of its schedule's actions and of its waits."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

TRACES = "traces"
"""The folder of all traces in a run folder."""
_ANCHORS = 5
# Below the clocks' own resolution, in digits of a second.
_DIGITS = 7

SpanKind = Literal["actions", "waits", "sends"]
# Kind, chunk and micro batch of an action or a message.
SpanOf = tuple[Literal["F", "B", "I", "W"], int, int]


class TraceClock(Protocol):
    """Time stamps of one rank. started_at: the second since 1970, of this host's clock, from which `seconds` counts."""

    started_at: float

    def stamp(self) -> Any:
        """Return a time stamp."""

    def seconds(self, stamp: Any) -> float:
        """Return the seconds from the start of the clock to a stamp."""


class HostClock:
    """The clock of a rank that computes on the CPU, where a stamp is a number."""

    def __init__(self) -> None:
        self._base = self.stamp()
        self.started_at = host_seconds(self._base)

    stamp = staticmethod(time.perf_counter)

    def seconds(self, stamp: float) -> float:
        return stamp - self._base

    def between(self, start: float, end: float) -> float:
        return end - start


def host_seconds(stamp: float) -> float:
    """Return the second since 1970 of a stamp of perf_counter.

    By the closest of a few readings of both clocks: a busy host may stop a process between the two.
    """
    readings = []
    for _ in range(_ANCHORS):
        before, now = time.perf_counter(), time.time()
        readings.append((time.perf_counter() - before, now - before))
    return stamp + min(readings)[1]


class TracedPhase(NamedTuple):
    """A phase of a step (the text of an `Activity`), in seconds from the start of the trace."""

    name: str
    start: float
    end: float


class TracedSpan(NamedTuple):
    """An action of the schedule (F, B, I, W), or a message (F, B) of topology.transfers, in seconds as a phase."""

    kind: Literal["F", "B", "I", "W"]
    chunk: int
    micro_batch: int
    start: float
    end: float


class StepTrace:
    """Collects the stamps of one step."""

    def __init__(self, clock: TraceClock, phase: str):
        self._clock = clock
        self._phases = [(phase, clock.stamp())]
        self._spans: dict[SpanKind, list[tuple[SpanOf, Any, Any]]] = {"actions": [], "waits": [], "sends": []}

    def begin(self, phase: str) -> None:
        """Note that a phase begins, and that the one before it ends."""
        self._phases.append((phase, self._clock.stamp()))

    @contextmanager
    def span(self, kind: SpanKind, of: SpanOf) -> Iterator[None]:
        """Note the time inside of the `with` block, of an action or a message."""
        start = self._clock.stamp()
        yield
        self._spans[kind].append((of, start, self._clock.stamp()))

    def finished(self, facts: "TracedStepFacts") -> "RankTrace":
        """Return the trace, which ends here. Waits for the device."""
        self.begin("")
        phases = [(name, self._seconds(stamp)) for name, stamp in self._phases]
        return RankTrace(
            **vars(facts),
            started_at=self._clock.started_at,
            phases=[TracedPhase(*each, end) for each, (_, end) in pairwise(phases)],
            actions=self._timed("actions"),
            waits=self._timed("waits"),
            sends=self._timed("sends"),
        )

    def _timed(self, kind: SpanKind) -> list[TracedSpan]:
        return [
            TracedSpan(*of, self._seconds(start), self._seconds(end)) for of, start, end in self._spans[kind]
        ]

    def _seconds(self, stamp: Any) -> float:
        return round(self._clock.seconds(stamp), _DIGITS)


@dataclass(frozen=True)
class TracedStepFacts:
    """The facts of a traced step.

    place: axis -> the rank's coordinate. schedule: the one that runs (1f1b on one stage). chunks: of each stage.
    """

    step: int
    rank: int
    world_size: int
    place: dict[str, int]
    host: str
    device: str
    schedule: str
    stages: int
    micro_batches: int
    chunks: int


@dataclass(frozen=True)
class RankTrace(TracedStepFacts):
    """The trace of one step on one rank, as its file has it.

    started_at: the second since 1970 of the rank's host, from which all other times count.
    waits: for messages of another stage. sends: the waits for messages of this stage, behind its last action.
    """

    started_at: float
    phases: Sequence[TracedPhase]
    actions: Sequence[TracedSpan]
    waits: Sequence[TracedSpan]
    sends: Sequence[TracedSpan]

    def write(self, traces: Path) -> None:
        """Write the file of this rank below the folder of all traces."""
        path = trace_file(traces, self.step, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(vars(self)) + "\n")
        unfinished.replace(path)


def step_folder(traces: Path, step: int) -> Path:
    """Return the folder of a traced step."""
    return traces / f"step-{step:06}"


def trace_file(traces: Path, step: int, rank: int) -> Path:
    """Return the file in which a rank leaves its trace of a step."""
    return step_folder(traces, step) / f"rank-{rank:05}.json"
