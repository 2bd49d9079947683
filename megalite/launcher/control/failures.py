"""Failure reports: each failed rank writes one, and the first cause is separated from its consequences."""

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from megalite.errors import LaunchError, MegaliteError, disk_error
from megalite.launcher.control.progress import Activity, Progress, progress
from megalite.launcher.rank.detect import RankInfo
from megalite.topology.axes import Layout

# The errors of a rank whose peer died, by name and text, because torch raises most of them as RuntimeError.
_PEER_EXCEPTIONS = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_PEER_ERRORS = (ConnectionResetError, ConnectionAbortedError, ConnectionRefusedError, BrokenPipeError)
_LATE_PEER_MESSAGES = (
    "timed out waiting",
    "wait timeout",
    "collective operation timeout",
)
_PEER_MESSAGES = (
    *_LATE_PEER_MESSAGES,
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connectfullmesh failed",
    "connection timed out",
    "no route to host",
    "pair closure",
    "socket closed",
    "broken pipe",
    "timeout waiting for key",
    "socket timeout",
    "nccl communicator was aborted",
    "remote process exited or there was a network error",
)

# A report must fit into one message to the coordinator, and some errors hold whole tensors.
_LONGEST_TEXT = 100_000

_USUAL_SENDERS = {
    signal.SIGKILL: "the kernel's out-of-memory killer is the usual sender; `dmesg` names its victims",
    signal.SIGBUS: "a full /dev/shm or disk behind mapped memory is the usual cause",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGABRT: "a library aborted; its message is above (NCCL's watchdog does so to a collective that took longer "
    "than launch.collective_seconds)",
}


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank.

    job: identifies the start of the job. exception: the type; "" for a rank that was killed, exited or vanished.
    signal: the name of the signal that killed it. lost: its connection ended, and nobody saw how the rank ended.
    secondary: the rank failed only because another rank was gone.
    expected: a MegaliteError, written for the user, who needs no type and traceback.
    origin: the exception at the start of the `raise ... from` chain. frames: where it was raised, innermost first.
    step, activity, collective: the last finished step, the work after it, and the last collective that began.
    file: the full report on the rank's host.
    """

    rank: int
    coordinates: Mapping[str, int]
    node: str
    pid: int
    job: str
    time: float
    exception: str
    message: str
    exit_code: int = 1
    secondary: bool = False
    expected: bool = False
    lost: bool = False
    signal: str = ""
    step: int | None = None
    activity: str = ""
    collective: str = ""
    origin: str = ""
    frames: Sequence[str] = field(default_factory=tuple)
    traceback: str = ""
    file: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "FailureReport":
        """Return the report that `asdict` has made a table of; ValueError for a table that is no report."""
        known = {name: value for name, value in values.items() if name in _TYPES}
        for name, value in known.items():
            # True is an int in Python.
            if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] is not bool):
                raise ValueError(f"a failure report whose {name} is {str(value)[:40]!r}")
        try:
            report = cls(**known)
        except TypeError as error:
            raise ValueError(f"a failure report that is not complete: {error}") from error
        if not all(isinstance(place, int) for place in report.coordinates.values()):
            raise ValueError("a failure report whose coordinates are no numbers")
        return replace(report, frames=[str(frame) for frame in report.frames])

    @property
    def cause(self) -> tuple[str, str]:
        return (self.exception, self.message)

    @property
    def who(self) -> str:
        """The rank, its coordinates and its host."""
        at = ", ".join(f"{axis} {place}" for axis, place in self.coordinates.items())
        return f"rank {self.rank}{f' ({at})' if at else ''} on {self.node}"

    @property
    def headline(self) -> str:
        """The failure without the rank: one line, unless the message was written for the user."""
        if self.expected or not self.exception:
            return self.message
        return _one_line(self.exception, self.message)


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("rank", "pid", "exit_code"), int),
    **dict.fromkeys(("node", "job", "exception", "message", "signal", "activity", "collective"), str),
    **dict.fromkeys(("origin", "traceback", "file"), str),
    **dict.fromkeys(("secondary", "expected", "lost"), bool),
    "coordinates": dict,
    "time": (int, float),
    "step": (int, type(None)),
    "frames": (list, tuple),
}


class FailureFolder:
    """The folder `failures/` of a run: one file per failed rank, written atomically."""

    def __init__(self, path: Path, layout: Layout, job: str):
        self.path, self._layout, self._job = path, layout, job

    def file_of(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.json"

    def clear(self, ranks: Iterable[int] | None = None) -> None:
        """Remove the reports of an earlier run, by default of all ranks; LaunchError if that fails."""
        try:
            for path in self.path.glob("rank-*.json") if ranks is None else map(self.file_of, ranks):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise LaunchError(f"{self.path}: reports of an earlier run cannot be removed: {error}") from error

    def write(self, report: FailureReport) -> FailureReport:
        """Write a report and return it with its file; without one if the folder cannot be written.

        That does not hide the failure: it is no error, and on a full disk stderr has the cause instead.
        """
        path = self.file_of(report.rank)
        written = replace(report, file=str(path))
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(written), indent=2) + "\n")
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                sys.stderr.write(f"{report.who}: {report.headline}\n")
            return report
        return written

    def read(self) -> list[FailureReport]:
        """Return the reports of this job; damaged files and those of other jobs are ignored."""
        reports = []
        for path in sorted(self.path.glob("rank-*.json")):
            try:
                reports.append(FailureReport.from_dict(json.loads(path.read_text())))
            except (OSError, ValueError, AttributeError):
                continue
        return [report for report in reports if report.job == self._job]

    def of_exception(self, info: RankInfo, error: BaseException) -> FailureReport:
        """Return the report of an exception that ended this rank."""
        cause, secondary = _cause_of(error)
        cause = (isinstance(cause, OSError) and disk_error(cause)) or cause
        # Nobody has lost a peer before the first collective: the ranks could not connect to each other.
        unconnected = secondary and not progress.last_collective
        expected = isinstance(cause, MegaliteError) or (unconnected and isinstance(cause, RuntimeError))
        origin = _innermost(cause)
        frames = traceback.extract_tb(origin.__traceback__)[-3:]
        return self._report(
            info,
            os.getpid(),
            progress,
            exception=type(cause).__name__,
            message=_unconnected(cause) if expected and unconnected else _with_limit(cause)[:_LONGEST_TEXT],
            exit_code=cause.exit_code if isinstance(cause, MegaliteError) else 1,
            secondary=secondary and not unconnected,
            expected=expected,
            origin=_one_line(type(origin).__name__, str(origin)) if origin is not cause else "",
            frames=[f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TEXT:],
        )

    def of_exit(
        self, info: RankInfo, pid: int, exit_code: int, ended: float, progress: Progress
    ) -> FailureReport:
        """Return the report of a rank that ended without writing one; `exit_code` is negative for a signal.

        progress: the marks that the rank has left.
        """
        message, name = _describe_exit(exit_code), _signal_name(-exit_code)
        return replace(self._report(info, pid, progress, message=message, signal=name), time=ended)

    def of_lost_launcher(self, info: RankInfo, gone: str) -> FailureReport:
        """Return the report of this rank when its launcher is gone. gone: what was noticed."""
        message = f"ended itself, because its launcher is gone: {gone}"
        return self._report(info, os.getpid(), progress, message=message)

    def _report(
        self, info: RankInfo, pid: int, progress: Progress, *, exception: str = "", **fields: Any
    ) -> FailureReport:
        known = (
            progress.step is not None or progress.last_collective or progress.phase != Activity.STARTING.value
        )
        return FailureReport(
            rank=info.rank,
            coordinates=self._layout.named_places(info.rank),
            node=info.node,
            pid=pid,
            job=self._job,
            time=time.time(),
            exception=exception,
            step=progress.step,
            activity=progress.phase if known else "",
            collective=progress.last_collective,
            **fields,
        )


def first_cause(reports: Sequence[FailureReport]) -> FailureReport:
    """Return the earliest report that is not secondary, or the earliest of all."""
    primary = [report for report in reports if not report.secondary]
    return min(primary or reports, key=lambda report: (report.time, report.rank))


def _cause_of(error: BaseException) -> tuple[BaseException, bool]:
    """Return the exception that caused the failure, and whether it is only the loss of a peer.

    torch's pipeline wraps the exceptions of a stage (`raise ... from`), so the innermost exception decides; a
    MegaliteError in the chain is preferred. If a collective failed while another exception was handled (in a
    `finally`), that other exception is the cause.
    """
    innermost = _innermost(error)
    if _is_loss_of_peer(innermost):
        earlier = innermost.__context__
        while earlier is not None and _is_loss_of_peer(earlier):
            earlier = earlier.__context__
        return (innermost, True) if earlier is None else (earlier, False)
    wrapped: BaseException | None = error
    while wrapped is not None and not isinstance(wrapped, MegaliteError):
        wrapped = wrapped.__cause__
    return wrapped or error, False


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(exception: str, message: str) -> str:
    """Return "type: message", as at the end of a traceback, with the first non-empty line of the message only."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{exception}: {lines[0]}" if lines else exception


def _is_loss_of_peer(error: BaseException) -> bool:
    # A collective library that finds no memory reports it as a failure of its own.
    if isinstance(error, MegaliteError) or "out of memory" in str(error).lower():
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return (
        isinstance(error, _PEER_ERRORS)
        or bool(names & _PEER_EXCEPTIONS)
        or (isinstance(error, RuntimeError) and any(message in text for message in _PEER_MESSAGES))
    )


def _with_limit(error: BaseException) -> str:
    """Return the message; that of a collective that another rank did not join in time names the setting first."""
    text = str(error)
    # Generation and evaluation have no such setting.
    if progress.phase == Activity.INFERENCE.value or not _is_loss_of_peer(error):
        return text
    if not any(message in text.lower() for message in _LATE_PEER_MESSAGES):
        return text
    return f"another rank did not join a collective within launch.collective_seconds: {text}"


def _describe_exit(exit_code: int) -> str:
    if exit_code == 128 + signal.SIGINT:
        return "was interrupted (SIGINT)"
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and left no report; see what it printed"
    named = {int(number): number for number in signal.Signals}.get(-exit_code)
    if named is None:
        return f"was killed by signal {-exit_code}"
    sender = _USUAL_SENDERS.get(named)
    return f"was killed by signal {-exit_code} ({named.name})" + (f": {sender}" if sender else "")


def _signal_name(number: int) -> str:
    """Return the name of a signal, its number if it has none, "" for what is no signal."""
    if number <= 0:
        return ""
    return next((each.name for each in signal.Signals if each == number), str(number))


def _unconnected(error: BaseException) -> str:
    """Return the message, with a remedy, of an error from which no process group came about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    lower = text.lower()
    if "address already in use" in lower or "eaddrinuse" in lower:
        remedy = (
            "another process listens on this port: end it, or set MASTER_PORT to a free port on every rank"
        )
    elif os.strerror(errno.ENOSPC).lower() in lower or os.strerror(errno.EFBIG).lower() in lower:
        remedy = (
            f"the ranks meet in {gettempdir()}: free space there, or set TMPDIR to a folder on another disk"
        )
    elif "[127." in lower or "127.0." in lower:
        remedy = (
            "a host has given its loopback address to the others: set GLOO_SOCKET_IFNAME to the network interface "
            "between the hosts on each of them, or remove the line with 127.0.1.1 from /etc/hosts"
        )
    else:
        remedy = (
            "check that MASTER_ADDR is the address of rank 0's host, that each host reaches the others through the "
            "interface in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME), and that no firewall is between them"
        )
    return f"the ranks cannot connect to each other: {text}; {remedy}"
