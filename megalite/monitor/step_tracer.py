"""Traces of chosen steps (monitor.trace_steps): each rank writes a small file of its own."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from megalite.launcher.control.communication import WaitClock
from megalite.launcher.control.progress import progress
from megalite.launcher.control.step_trace import (
    HostClock,
    StepTrace,
    TraceClock,
    TracedStepFacts,
    host_seconds,
    step_folder,
)


class StepTracer:
    """Traces the chosen steps of one rank. A file that cannot be written ends no run: `failure` says why."""

    def __init__(
        self, steps: Collection[int], traces: Path, facts: TracedStepFacts, device: torch.device
    ) -> None:
        """traces: the folder of all traces. facts: of any step."""
        self.failure = ""
        self._steps, self._traces, self._facts, self._device = frozenset(steps), traces, facts, device

    @contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Trace what happens inside of the `with` block if this step is one of the chosen; write it at the end."""
        if step not in self._steps:
            yield False
            return
        progress.trace = trace = StepTrace(clock_of(self._device), progress.phase)
        try:
            yield True
        finally:
            progress.trace = None
        finished, self.failure = trace.finished(replace(self._facts, step=step)), ""
        try:
            finished.write(self._traces)
        except OSError as error:
            self.failure = f"{step_folder(self._traces, step)} is not complete: {error.strerror}"


class StepClock(TraceClock, WaitClock, Protocol):
    """Time stamps of a traced step, and of the waits of any."""


def clock_of(device: torch.device) -> StepClock:
    """Return a clock whose stamps are in the order of the device's work, which starts now."""
    return HostClock() if device.type == "cpu" else _DeviceClock(device)


class _DeviceClock:
    """The clock of an accelerator: a stamp is an event of the current stream. Waits for the device once, to start."""

    def __init__(self, device: torch.device):
        self._device = device
        torch.accelerator.synchronize(device)
        before = time.perf_counter()
        self._base = self.stamp()
        self._base.synchronize()
        self.started_at = host_seconds((before + time.perf_counter()) / 2)

    def stamp(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.Event) -> float:
        stamp.synchronize()
        return float(self._base.elapsed_time(stamp)) / 1e3

    def between(self, start: torch.Event, end: torch.Event) -> float | None:
        return float(start.elapsed_time(end)) / 1e3 if end.query() else None
