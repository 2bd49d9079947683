"""Failure reports: each failed rank writes one, and the first cause is separated from its consequences."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megalite.errors import LaunchError, MegaliteError, RankFailure
from megalite.launcher.detect import RankInfo
from megalite.topology.axes import Layout

# The errors of a rank whose peer died, by name and text, because torch raises most of them as RuntimeError.
_PEER_EXCEPTIONS = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_PEER_ERRORS = (ConnectionResetError, ConnectionAbortedError, ConnectionRefusedError, BrokenPipeError)
_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connectfullmesh failed",
    "connection timed out",
    "no route to host",
    "pair closure",
    "socket closed",
    "broken pipe",
    "timed out waiting",
    "timeout waiting for key",
    "wait timeout",
    "socket timeout",
    "collective operation timeout",
    "nccl communicator was aborted",
    "remote process exited or there was a network error",
)

_USUAL_SENDERS = {
    signal.SIGKILL: "the kernel's out-of-memory killer is the usual sender; `dmesg` names its victims",
    signal.SIGBUS: "a full /dev/shm or disk behind mapped memory is the usual cause",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGILL: "a library was built for another processor",
    signal.SIGABRT: "a library aborted; its message is above",
}


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank.

    job: identifies the start of the job. exception: the type; "" for a rank that was killed or exited.
    secondary: the rank failed only because another rank was gone.
    expected: a MegaliteError, written for the user, who needs no type and traceback.
    origin: the exception at the start of the `raise ... from` chain. frames: where it was raised, innermost first.
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
    origin: str = ""
    frames: Sequence[str] = field(default_factory=tuple)
    traceback: str = ""

    @property
    def cause(self) -> tuple[str, str]:
        return (self.exception, self.message)

    @property
    def headline(self) -> str:
        """The failure without the rank: one line, unless the message was written for the user."""
        if self.expected or not self.exception:
            return self.message
        return _one_line(self.exception, self.message)


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

    def write(self, report: FailureReport) -> None:
        """Write a report; an unwritable folder is ignored, so that it does not hide the failure."""
        path = self.file_of(report.rank)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(report), indent=2) + "\n")
            partial.replace(path)
        except OSError:
            return

    def read(self) -> list[FailureReport]:
        """Return the reports of this job; damaged files and those of other jobs are ignored."""
        reports = []
        for path in sorted(self.path.glob("rank-*.json")):
            try:
                reports.append(FailureReport(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        return [report for report in reports if report.job == self._job]

    def of_exception(self, info: RankInfo, error: BaseException) -> FailureReport:
        """Return the report of an exception that ended this rank."""
        cause, secondary = _cause_of(error)
        origin = _innermost(cause)
        frames = traceback.extract_tb(origin.__traceback__)[-3:]
        return FailureReport(
            rank=info.rank,
            coordinates=asdict(self._layout.coordinates(info.rank)),
            node=info.node,
            pid=os.getpid(),
            job=self._job,
            time=time.time(),
            exception=type(cause).__name__,
            message=str(cause),
            exit_code=cause.exit_code if isinstance(cause, MegaliteError) else 1,
            secondary=secondary,
            expected=isinstance(cause, MegaliteError),
            origin=_one_line(type(origin).__name__, str(origin)) if origin is not cause else "",
            frames=[f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)],
            traceback="".join(traceback.format_exception(error)),
        )

    def of_exit(self, info: RankInfo, pid: int, exit_code: int, ended: float) -> FailureReport:
        """Return the report of a rank that ended without writing one; `exit_code` is negative for a signal."""
        return FailureReport(
            rank=info.rank,
            coordinates=asdict(self._layout.coordinates(info.rank)),
            node=info.node,
            pid=pid,
            job=self._job,
            time=ended,
            exception="",
            message=_describe_exit(exit_code),
        )

    def failure(self, reports: Sequence[FailureReport]) -> RankFailure:
        """Return the error with the first cause among all reports of a job."""
        first = first_cause(reports)
        alike = sum(report.cause == first.cause for report in reports)
        if first.expected and alike == self._layout.world_size:
            return RankFailure(first.message, first.exit_code)
        return RankFailure(self._block(first), first.exit_code)

    def _block(self, report: FailureReport) -> str:
        lines = [f"{self._layout.describe(report.rank)} on {report.node}: {report.headline}"]
        if report.secondary:
            lines.append("no rank reported another cause: look at the network, and at nodes that are gone")
        if not report.expected:
            lines += [f"caused by {report.origin}"] if report.origin else []
            lines += [f"at {frame}" for frame in report.frames]
        lines.append(f"full report: {self.file_of(report.rank)}")
        return "\n  ".join(lines)

    def own_failure(self, own: FailureReport) -> RankFailure:
        """Return the error of one of several failing ranks, when no parent process collects their reports.

        The full report if this rank is the first cause among the reports on this node, else one line.
        """
        who = f"{self._layout.describe(own.rank)} on {own.node}"
        if own.secondary:
            return RankFailure(f"{who} stopped because another rank did ({own.headline})", own.exit_code)
        others = [report for report in self.read() if report.rank != own.rank]
        first = first_cause([own, *others])
        if first is own:
            return RankFailure(self._block(own), own.exit_code)
        verb = "failed alike" if first.cause == own.cause else f"failed too ({own.headline})"
        return RankFailure(f"{who} {verb}: see rank {first.rank}", own.exit_code)


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
    if isinstance(error, MegaliteError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return (
        isinstance(error, _PEER_ERRORS)
        or bool(names & _PEER_EXCEPTIONS)
        or (isinstance(error, RuntimeError) and any(message in text for message in _PEER_MESSAGES))
    )


def _describe_exit(exit_code: int) -> str:
    if exit_code == 128 + signal.SIGINT:
        return "was interrupted (SIGINT)"
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and left no report"
    named = {int(number): number for number in signal.Signals}.get(-exit_code)
    if named is None:
        return f"was killed by signal {-exit_code}"
    sender = _USUAL_SENDERS.get(named)
    return f"was killed by signal {-exit_code} ({named.name})" + (f": {sender}" if sender else "")
