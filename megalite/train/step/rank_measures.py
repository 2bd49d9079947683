"""The measures that each rank takes of itself, gathered in one collective a report: memory, waits, own work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megalite.launcher.control.communication import COMMUNICATION_KINDS, CommunicationTimes
from megalite.launcher.control.progress import progress
from megalite.launcher.rank.detect import RankInfo
from megalite.monitor.memory import device_memory, process_memory
from megalite.monitor.slow_ranks import SlowRank, SlowRanks
from megalite.monitor.step_tracer import clock_of
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import AXES
from megalite.train.step.card_sensors import CardReading, CardSensors
from megalite.train.step.state import StepReport

# Below the temperature of any card.
_NO_READING = -274.0


@dataclass
class _OwnTimes:
    """The seconds of this rank since its last report. undisturbed: of steps beside which nothing else ran."""

    steps: int = 0
    step: float = 0.0
    data: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COMMUNICATION_KINDS, 0.0))
    undisturbed: int = 0
    work: float = 0.0


@dataclass(frozen=True)
class RankReport:
    """The measures of all ranks. memory_bytes, reserved_bytes: the largest.

    record: the other fields for metrics.jsonl. warnings, notes: lines for people.
    """

    memory_bytes: int
    reserved_bytes: int | None
    record: dict[str, Any]
    warnings: list[str]
    notes: list[str]


class RankMeasures:
    """The measures of this rank, gathered from all ranks at each report."""

    def __init__(self, mesh: ParallelMesh, info: RankInfo):
        """Collective."""
        self._mesh, self._world = mesh, mesh.layout.world_size
        self._times = _OwnTimes()
        self.peak_bytes, self.on_device = 0, False
        self._communication: CommunicationTimes | None = None
        self._hosts: list[str] = []
        self._sensors = None if mesh.device.type == "cpu" else CardSensors(mesh.device)
        self.note = "" if self._sensors is None else self._sensors.missing
        """Why there are no readings of this rank's card; empty where there are, and on CPUs."""
        # Stages may have unequal work: the ranks of one are compared, or each stage with its own first steps.
        self._slow = SlowRanks(mesh.layout.groups(*(axis for axis in AXES if axis != "pp")))
        if self._world > 1:
            self._communication = CommunicationTimes(clock_of(mesh.device))
            self._hosts = mesh.gather_objects(info.node) or []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the communication inside of the `with` block, which is a step."""
        progress.communication = self._communication
        try:
            yield
        finally:
            progress.communication = None

    def add(self, report: StepReport, *, disturbed: bool) -> None:
        """Add a step. disturbed: a checkpoint was written beside it, or it was profiled: its time is not usual."""
        times = self._times
        times.steps += 1
        times.step += report.step_seconds
        times.data += report.data_seconds
        waits = {} if self._communication is None else self._communication.take()
        for kind, seconds in waits.items():
            times.waits[kind] += seconds
        if not disturbed:
            times.undisturbed += 1
            times.work += max(0.0, report.step_seconds - sum(waits.values()))

    def measure_memory(self) -> tuple[int, int | None]:
        """Return the peak of this rank's memory, and what is reserved on its device."""
        memory = None if self._mesh.device.type == "cpu" else device_memory(self._mesh.device)
        self.on_device = memory is not None
        memory = memory or process_memory()
        self.peak_bytes = max(self.peak_bytes, memory.peak_bytes)
        return memory.peak_bytes, memory.reserved_bytes

    def report(self) -> RankReport:
        """Return the measures of all ranks since the last call. Collective."""
        peak, reserved = self.measure_memory()
        times, self._times = self._times, _OwnTimes()
        own = [
            peak,
            -1 if reserved is None else reserved,
            times.step,
            times.data,
            times.undisturbed,
            times.work,
        ]
        rows = self._of_all([*map(float, own), *self._reading(), *times.waits.values()])
        peaks, reserves, steps, data, undisturbed, work, *others = zip(*rows, strict=True)
        loads, watts, celsius, *waits = others
        report = RankReport(int(max(peaks)), None if reserved is None else int(max(reserves)), {}, [], [])
        if min(celsius) > _NO_READING:
            report.record.update(
                card_utilisation=fmean(loads), cards_watts=sum(watts), card_celsius_max=max(celsius)
            )
        if self._world > 1 and min(steps) > 0:
            report.record.update(_shares(steps, waits))
            if min(undisturbed) > 0:
                each = [seconds / count for seconds, count in zip(work, undisturbed, strict=True)]
                self._judge(
                    each, [seconds / times.steps for seconds in data], max(steps), times.steps, report
                )
        return report

    def _reading(self) -> CardReading:
        last = None if self._sensors is None else self._sensors.last
        return CardReading(0.0, 0.0, _NO_READING) if last is None else last

    def _of_all(self, own: list[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in rank order. Collective."""
        if self._world == 1:
            return [own]
        width = len(own)
        numbers = [0.0] * (self._world * width)
        numbers[self._mesh.rank * width : (self._mesh.rank + 1) * width] = own
        numbers = self._mesh.sum_over_world(numbers)
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def _judge(
        self, work: list[float], data: list[float], seconds: float, steps: int, report: RankReport
    ) -> None:
        """Add what is known of slow ranks to a report, on rank 0.

        work, data: the seconds of each rank in a step. seconds: of all steps.
        """
        if self._mesh.rank > 0:
            return
        began, ended = self._slow.update(work, seconds / steps, steps)
        report.warnings.extend(self._text(slow, data[slow.rank]) for slow in began)
        report.notes.extend(
            f"{self._name(rank)} is as fast as {'at the start' if self._slow.alone else 'the other ranks of its stage'}"
            " again"
            for rank in ended
        )
        if self._slow.slow:
            slowest = max(self._slow.slow.values(), key=lambda slow: slow.factor)
            report.record.update(
                slow_rank=slowest.rank,
                slow_rank_factor=slowest.factor,
                alarm=self._text(slowest, data[slowest.rank]),
            )

    def _text(self, slow: SlowRank, data_seconds: float) -> str:
        batch = f", {data_seconds:.3g} s of them for its batch" if data_seconds > slow.seconds / 2 else ""
        usual = (
            "at the start, beside what other stages changed"
            if self._slow.alone
            else "that of the other ranks of its stage"
        )
        return (
            f"{self._name(slow.rank)} is slow: its own work takes {slow.seconds:.3g} s a step{batch}, "
            f"{slow.factor:.1f} times as long as {usual}"
        )

    def _name(self, rank: int) -> str:
        return f"{self._mesh.layout.describe(rank)} on {self._hosts[rank]}"


def _shares(steps: tuple[float, ...], waits: list[tuple[float, ...]]) -> dict[str, float]:
    """Return the shares of the step in which ranks communicate.

    steps: the seconds of each rank's steps; waits: for each kind, those of its communication.
    """
    by_kind = {
        f"communication_share/{kind}": fmean(map(_share, seconds, steps))
        for kind, seconds in zip(COMMUNICATION_KINDS, waits, strict=True)
        if any(seconds)
    }
    totals = [_share(sum(seconds), step) for *seconds, step in zip(*waits, steps, strict=True)]
    return {"communication_share": fmean(totals), "communication_share_max": max(totals), **by_kind}


def _share(seconds: float, step: float) -> float:
    # Events of a device may reach a little beyond the host's step.
    return min(1.0, seconds / step)
