"""The state of a run as its folder shows it, to a reader that changes nothing there. No torch."""

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import PARTIAL, find_latest, published_checkpoints
from megalite.cli.results import report
from megalite.errors import ConfigError, Problem
from megalite.launcher.control.failures import FailureReport, first_cause
from megalite.launcher.exit_codes import STOPPED
from megalite.monitor.metrics import TEXTS
from megalite.monitor.run_view import RunHistory, RunStatus, seconds_left

_OWN_FILES = ("metrics.jsonl", "run.toml", "checkpoints", "failures", ".in-use")
# A run is quiet after this time without a record, and after as many usual steps.
_QUIET_SECONDS, _QUIET_STEPS = 30.0, 10
_SETTLED_SECONDS = 10.0
_NOBODY = "no process of this machine uses the folder"
# Clocks of hosts differ, and a failed rank may leave its report before rank 0 records the step.
_CLOCKS_DIFFER_SECONDS = 60.0
# The errors of a file with any content, such as the first half of a table.
_NO_SUCH_CONTENT = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class _Traces:
    """The files of a run beside its records. Times are seconds since the epoch, 0.0 for a file that is not there.

    in_use: whether a process of this machine has the folder's lock. saving: the name of the unfinished checkpoint.
    """

    recorded: float
    started: float
    in_use: bool
    saved_step: int | None
    saved: float
    saving: str
    failure: FailureReport | None


def report_run(folder: Path, notes: Sequence[str], code: int) -> None:
    """Add where a run stands to the document of --json, for a command that trained it and ends with an exit code."""
    if is_run_folder(folder):
        reader, checkpoints, export = RunFolderReader(folder), folder / "checkpoints", folder / "export"
        status = reader.report(reader.read())
        if code == STOPPED:  # the folder of a run that goes on elsewhere looks the same
            status["state"] = "stopped"
        latest = find_latest(checkpoints) if checkpoints.is_dir() else None
        named = {"folder": folder, "checkpoint": latest, "export": export if export.is_dir() else None}
        report(**status, **named, notes=notes)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has anything that a run writes, and this user may look into it."""
    with suppress(PermissionError):
        return any((folder / name).exists() for name in _OWN_FILES)
    return False


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders that the arguments name. ConfigError for an argument with none."""
    folders: dict[Path, None] = {}
    for path in paths:
        own = [path] if is_run_folder(path) else sorted(filter(is_run_folder, path.glob("*/")))
        if not own:
            wrong = "has no run" if path.is_dir() else "is not a folder"
            remedy = "name the run.folder of a run, such as runs/default, or a folder of them"
            raise ConfigError([Problem("RUN", f"{path} {wrong}", remedy)], "the command line")
        folders |= dict.fromkeys(own)
    return list(folders)


class RunFolderReader:
    """Follows one run folder: `read` takes in what was written since the last call, and hands each record to `take`."""

    def __init__(self, folder: Path, take: Callable[[Mapping[str, Any]], None] = lambda record: None):
        self.folder, self._take = folder, take
        self.history = RunHistory()
        self._metrics = folder / "metrics.jsonl"
        # Where the next record begins, and the record before it, by which a rewritten file is known.
        self._offset, self._last_line = 0, b""
        self._damaged = 0

    def read(self) -> RunStatus:
        """Return the state; the records are in `history`."""
        with suppress(OSError):
            self._read_records()
        traces, total = self._traces(), self._total_steps() or self.history.total_steps
        state, detail = self._state(traces, total)
        now, notes = time.time(), []
        if traces.saved_step is not None:
            notes.append(f"checkpoint after step {traces.saved_step:,}, {ago(now - traces.saved)} ago")
        if self.history.last:
            notes.append(f"last record {ago(now - traces.recorded)} ago")
        alarms = [f"{self._damaged:,} damaged lines in metrics.jsonl"] if self._damaged else []
        if state in ("running", "saving") and (quiet := self._quiet(traces)):
            alarms.append(quiet)
        return RunStatus(state, str(self.folder), detail, total, notes=notes, alarms=alarms)

    def report(self, status: RunStatus) -> dict[str, Any]:
        """Return the state and the last numbers, for programs."""
        history, traces = self.history, self._traces()
        record = history.last
        return {
            "run": status.name,
            "state": status.state,
            "detail": status.detail,
            "step": history.step,
            "total_steps": status.total_steps,
            "seconds_left": seconds_left(record, status.total_steps),
            "usual_step_seconds": history.usual_seconds,
            "seconds_since_record": time.time() - traces.recorded if record else None,
            "checkpoint_step": traces.saved_step,
            "alarms": [*history.alarms, *status.alarms],
            "last_step": dict(record) or None,
            "last_validation": _of_validation(history.validation),
            "lowest_validation": _of_validation(history.best_validation),
        }

    def _read_records(self) -> None:
        with self._metrics.open("rb") as file:
            file.seek(max(0, self._offset - len(self._last_line)))
            if file.read(len(self._last_line)) != self._last_line:
                # A resumed run has cut off the records behind its checkpoint.
                self.history, self._offset, self._last_line, self._damaged = RunHistory(), 0, b"", 0
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset, self._last_line = self._offset + len(line), line
                try:
                    record = _record_of(line)
                except ValueError:
                    self._damaged += 1
                    continue
                self.history.add(record)
                self._take(record)

    def _traces(self) -> _Traces:
        checkpoints = self.folder / "checkpoints"
        saved = max(published_checkpoints(checkpoints).items(), default=None)
        partial = [
            match[1] for path in checkpoints.glob(".step-*") if (match := PARTIAL.fullmatch(path.name))
        ]
        return _Traces(
            recorded=_changed(self._metrics),
            started=_changed(self.folder / "run.toml"),
            in_use=_is_locked(self.folder / ".in-use"),
            saved_step=None if saved is None else saved[0],
            saved=0.0 if saved is None else _changed(saved[1]),
            saving=max(partial, default=""),
            failure=_failure(self.folder / "failures"),
        )

    def _total_steps(self) -> int | None:
        """Return training.steps of the resolved run; None before it is written, and for a run of epochs.

        Those of a run of epochs stand in its records.
        """
        with suppress(OSError, *_NO_SUCH_CONTENT):
            settings = tomllib.loads((self.folder / "run.toml").read_text(encoding="utf-8"))
            steps = settings["training"].get("steps")
            return steps if isinstance(steps, int) else None
        return None

    def _state(self, traces: _Traces, total: int | None) -> tuple[str, str]:
        """Return the state and its detail."""
        step, failure = self.history.step, traces.failure
        if not self.folder.is_dir():
            return "gone", "the folder is no longer there"
        latest = max(traces.recorded, traces.started) - _CLOCKS_DIFFER_SECONDS
        if failure is not None and not traces.in_use and failure.time > latest:
            return "failed", f"{failure.who}: {failure.headline}"
        all_saved = step is not None and traces.saved_step == step
        if all_saved and not traces.in_use:
            if step == total:
                return "ended", ""
            # A run on another host goes on after a save.
            if time.time() - max(traces.recorded, traces.saved) > _SETTLED_SECONDS + 3 * self._usual_seconds:
                return "stopped", f"step {step:,} is saved, and the same command resumes there"
        if not self.history.last or (traces.started > traces.recorded and traces.in_use):
            return "preparing", "no step yet" if traces.in_use else f"no step yet; {_NOBODY}"
        if traces.saving:
            return "saving", traces.saving
        return "running", "every step is saved; the export follows" if all_saved and step == total else ""

    def _quiet(self, traces: _Traces) -> str:
        """Return how long nothing was recorded, if that is longer than usual."""
        usual, quiet = self._usual_seconds, time.time() - max(traces.recorded, traces.started, traces.saved)
        if quiet < max(_QUIET_SECONDS, _QUIET_STEPS * usual):
            return ""
        text = f"no record for {ago(quiet)}, a step usually takes {usual:.3g} s"
        return text if traces.in_use else f"{text}; {_NOBODY}"

    @property
    def _usual_seconds(self) -> float:
        return self.history.usual_seconds or 0.0


def ago(seconds: float) -> str:
    """Return a length of time in its largest unit: 12 min."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _record_of(line: bytes) -> dict[str, Any]:
    """Return the record in a line of metrics.jsonl. Raises ValueError where a value is neither null nor finite."""
    try:
        record: dict[str, Any] = json.loads(line)
        if isinstance(record["step"], int) and all(
            value is None or (key in TEXTS and isinstance(value, str)) or math.isfinite(value)
            for key, value in record.items()
        ):
            return record
    except _NO_SUCH_CONTENT as error:
        raise ValueError("not a record") from error
    raise ValueError("not a record")


def _failure(folder: Path) -> FailureReport | None:
    """Return the first cause among the reports of failed ranks; None without one that can be read."""
    reports = []
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, *_NO_SUCH_CONTENT):
            reports.append(FailureReport.from_dict(json.loads(path.read_text(encoding="utf-8"))))
    if not reports:
        return None
    job = max(reports, key=lambda report: report.time).job
    return first_cause([report for report in reports if report.job == job])


def _of_validation(record: Mapping[str, Any]) -> dict[str, Any] | None:
    own = {key: value for key, value in record.items() if key == "step" or key.startswith("validation_")}
    return own or None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine has locked a file; asked without a lock, which would keep a run out."""
    try:
        number = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any(
        "FLOCK" in line and line.split()[5].rpartition(":")[2] == number
        for line in locks.splitlines()
        if "->" not in line
    )
