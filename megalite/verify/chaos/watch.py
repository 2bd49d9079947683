"""Follow a job by what it prints and writes: its attempts, their steps, checkpoints and first causes. No torch."""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megalite.checkpoint.folder import named_by
from megalite.monitor.jsonl import end_of_step
from megalite.verify.chaos.job import LaunchedJob

_RESTART = re.compile(r"restart \d+ of \d+ in .*, after: (.*)")
# Said once the records behind the resumed checkpoint are cut off, and before the first step.
_LOADED = re.compile(r"memory( of the largest rank)?: weights ")
_CAUSE = re.compile(r"error: |step \d+ hangs: |SIG\w+: the run saves and ends")


class SeenStep(NamedTuple):
    """A step that an attempt made, and when its record was seen (time.monotonic)."""

    at: float
    step: int
    seconds: float
    slow_rank: int | None


@dataclass
class Attempt:
    """One start of all ranks; times are those of time.monotonic, None before the event.

    ranks_at: all ranks are processes. loaded_at: the weights are there. resumed: the last step before this attempt.
    cause_at, cause: of the first error, or of a signal that the job heeds, on the screen. number_of_ranks: planned.
    """

    began: float
    number_of_ranks: int
    ranks_at: float | None = None
    loaded_at: float | None = None
    resumed: int = 0
    cause_at: float | None = None
    cause: str = ""
    steps: list[SeenStep] = field(default_factory=list)

    @property
    def up_from(self) -> float | None:
        """When its first step began."""
        return self.steps[0].at - self.steps[0].seconds if self.steps else None

    @property
    def up_until(self) -> float | None:
        """When its last step ended."""
        return self.steps[-1].at if self.steps else None


class JobWatch:
    """Takes in what a job prints and writes; `look` is to be called many times a second."""

    def __init__(self, run_folder: Path):
        self.attempts: list[Attempt] = []
        self.processes: list[int] = []
        """The ranks of this attempt, in order, from its `ranks_at` on."""
        self.last_lines: list[str] = []
        self._folder, self._offset = run_folder, 0

    @property
    def now(self) -> Attempt:
        """The attempt under way, or the last one."""
        return self.attempts[-1]

    @property
    def newest_checkpoint(self) -> Path | None:
        """The checkpoint that `latest` names, as far as it is published."""
        named = named_by(self._folder / "checkpoints" / "latest")
        return named if named is not None and named.is_dir() else None

    def begin(self, number_of_ranks: int) -> None:
        """Note that the ranks are to be started, by a launcher that has just been started itself."""
        self.attempts.append(Attempt(time.monotonic(), number_of_ranks))
        self.processes = []

    def look(self, job: LaunchedJob) -> None:
        """Take in what is new."""
        # Records first: a line says when an attempt ends, and these are of the attempt before.
        lines = job.lines()
        self._read_records()
        for at, line in lines:
            self._take(at, line)
        now = self.now
        if now.ranks_at is None and len(processes := job.ranks()) == now.number_of_ranks:
            now.ranks_at, self.processes = time.monotonic(), processes

    def _take(self, at: float, line: str) -> None:
        now = self.now
        self.last_lines = [*self.last_lines[-11:], line]
        if (restart := _RESTART.match(line)) is not None:
            if now.cause_at is None:
                now.cause_at, now.cause = at, restart[1]
            self.attempts.append(Attempt(at, now.number_of_ranks))
            self.processes = []
        elif _LOADED.match(line) and now.loaded_at is None:
            now.loaded_at, now.resumed, self._offset = at, self._resumed_step(), 0
            with suppress(OSError):
                self._offset = end_of_step(self._folder / "metrics.jsonl", now.resumed)
        elif now.cause_at is None and _CAUSE.match(line):
            now.cause_at, now.cause = at, line.removeprefix("error: ")
        elif now.cause and line.startswith("  "):
            now.cause += f"\n{line}"

    def _resumed_step(self) -> int:
        """Return the step after which rank 0 goes on, as it has just recorded it."""
        lines = (self._folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"])

    def _read_records(self) -> None:
        now = self.now
        if now.loaded_at is None:
            return
        with suppress(OSError), (self._folder / "metrics.jsonl").open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                record: dict[str, Any] = json.loads(line)
                if record["step"] > now.resumed:
                    at, slow = time.monotonic(), record.get("slow_rank")
                    now.steps.append(
                        SeenStep(
                            at, record["step"], record["step_seconds"], None if slow is None else int(slow)
                        )
                    )
