"""Start the runs of a study as processes of their own, several at once, and wait for events, not for times."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalite.launcher.exit_codes import INTERRUPTED, NOT_BEGUN, STOPPED, TERMINATED
from megalite.launcher.local import JobSignals
from megalite.launcher.process import die_with_parent
from megalite.studies.study_runs import StudyRun

_LOOK_SECONDS = 0.5
_CAUSE_LINES = 12
SAVED_CODES = (STOPPED, NOT_BEGUN, TERMINATED, INTERRUPTED)


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended, and how. seconds: of this start. processor_seconds: of all its processes."""

    run: StudyRun
    exit_code: int
    seconds: float
    processor_seconds: float
    cause: str = ""


@dataclass
class _Process:
    run: StudyRun
    process: "subprocess.Popen[bytes]"
    began: float


class RunPool:
    """Trains runs, `jobs` at once; stops all of them in good order after Ctrl-C, SIGTERM or SIGUSR1.

    The runs have sessions of their own, so that a terminal's Ctrl-C reaches this process alone; it sends them SIGTERM,
    upon which they save. A second Ctrl-C kills them. The kernel kills them if this process is killed.
    """

    def __init__(self, run_file: Path | None, *, jobs: int, say: Callable[[str], None]):
        self._run_file, self._jobs, self._say = run_file, jobs, say
        self._running: list[_Process] = []
        self.stopped_by: signal.Signals | None = None

    def train(self, runs: Sequence[StudyRun], on_end: Callable[[EndedRun], None]) -> None:
        """Train the runs in their order; call `on_end` after each. Returns early where a signal stops the study."""
        waiting = list(runs)
        with JobSignals() as signals:
            try:
                while self._running or (waiting and self.stopped_by is None):
                    while waiting and len(self._running) < self._jobs and self.stopped_by is None:
                        self._start(waiting.pop(0))
                    # Signals wake the wait; the limit covers one between the last look and here.
                    signals.wait(_LOOK_SECONDS)
                    self._stop(signals)
                    for ended in self._reaped():
                        on_end(ended)
            finally:
                for each in self._running:
                    _signal_session(each.process, signal.SIGKILL)

    def _start(self, run: StudyRun) -> None:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megalite", "train"]
        command += [*([str(self._run_file)] if self._run_file else []), *run.flags]
        with log_file(run).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._running.append(_Process(run, process, time.monotonic()))
        self._say(f"{run.name}: starts (log: {log_file(run)})")

    def _stop(self, signals: JobSignals) -> None:
        """Pass on the first signal as SIGTERM, and kill after one more Ctrl-C."""
        if self.stopped_by is None and (signals.interrupts or signals.terminations):
            self.stopped_by = signal.SIGINT if signals.interrupts else signals.terminations[0]
            if self._running:
                self._say(f"{self.stopped_by.name}: the runs save and stop; Ctrl-C again ends them at once")
            for each in self._running:
                with suppress(ProcessLookupError):
                    each.process.send_signal(signal.SIGTERM)
        elif signals.interrupts > (self.stopped_by == signal.SIGINT):
            for each in self._running:
                _signal_session(each.process, signal.SIGKILL)

    def _reaped(self) -> list[EndedRun]:
        ended = []
        for each in list(self._running):
            done, status, usage = os.wait4(each.process.pid, os.WNOHANG)
            if not done:
                continue
            self._running.remove(each)
            code = each.process.returncode = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            if self.stopped_by is not None and code == 128 + signal.SIGKILL:
                code = TERMINATED  # killed by a second Ctrl-C: no failure of the run
            cause = "" if code == 0 else _cause(log_file(each.run), code)
            seconds, cores = time.monotonic() - each.began, usage.ru_utime + usage.ru_stime
            ended.append(EndedRun(each.run, code, seconds, cores, cause))
        return ended


def log_file(run: StudyRun) -> Path:
    """Return the file that has what the run prints."""
    return run.folder.with_name(f"{run.folder.name}.log")


def _signal_session(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _cause(log: Path, code: int) -> str:
    """Return the error at the end of a log, or the exit code where it says none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    if not starts:
        return f"exit code {code}" + (f": {lines[-1].strip()}" if lines else "")
    text = lines[starts[-1] : starts[-1] + _CAUSE_LINES]
    block = text[:1] + [line for line in text[1:] if line.startswith(" ")]
    return " ".join(" ".join(block).removeprefix("error:").split())
