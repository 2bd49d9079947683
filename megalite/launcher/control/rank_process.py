"""Runs one rank that a launcher started, and ends its process in time when it, another or the launcher fails."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.errors import MegaliteError, RankFailure
from megalite.launcher.control.failures import FailureFolder, FailureReport
from megalite.launcher.control.launcher_watch import watch_launcher
from megalite.launcher.control.member import JobEnded
from megalite.launcher.control.messages import Verdict
from megalite.launcher.control.progress import progress
from megalite.launcher.control.rendezvous import Meeting
from megalite.launcher.control.verdicts import describe_end, describe_own
from megalite.launcher.process import end_process, identity, within
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import export_rank, meets_others
from megalite.topology.axes import Layout

# A folder or a terminal that hangs must not keep a rank from ending.
_WRITE_SECONDS, _SAY_SECONDS, _LAST_WORD_SECONDS = 1.0, 1.0, 0.6

# Ended by a signal: saved, nothing to save yet, SIGINT, SIGTERM.
_IN_GOOD_ORDER = (75, 76, 130, 143)


class RankEnd:
    """Ends the process of a rank that a launcher started, once, from the thread that first has a reason to.

    say: shows an error to the user. shows_verdict: whether rank 0 shows the verdict, as no launching process does.
    """

    def __init__(
        self,
        info: RankInfo,
        layout: Layout,
        failures: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        shows_verdict: bool = True,
    ):
        self.info = info
        self.judge: Meeting | None = None
        """The way to the coordinator, once the rank is connected to it."""
        self.folder = FailureFolder(failures, layout, job=_start_of(info))
        self._layout, self._say, self._shows_verdict = layout, say, shows_verdict
        # Taken by the thread that ends the process, and never given back.
        self._ending = threading.Lock()

    def watch(self) -> None:
        """Have the rank end when its launcher is gone."""
        watch_launcher(self.info.launcher, self.launcher_gone)

    def failed(self, error: BaseException) -> NoReturn:
        """End the process because of an exception: report it, show what this rank has to show, exit with its code."""
        self._ending.acquire()
        if isinstance(error, JobEnded):
            self._end(error.verdict)
        report = self.folder.of_exception(self.info, error)
        report = within(_WRITE_SECONDS, lambda: self.folder.write(report), report)
        verdict = self.judge.fail(report) if self.judge is not None else None
        if verdict is None:
            nothing: list[FailureReport] = []
            known = within(_WRITE_SECONDS, self.folder.read, nothing)
            others = [other for other in known if other.rank != report.rank]
            self._print(f"error: {describe_own(report, others)}")
            end_process(report.exit_code)
        self._end(verdict)

    def job_ended(self, verdict: Verdict) -> NoReturn:
        """End the process, whose main thread may wait for others in a collective, because the job has ended."""
        self._ending.acquire()
        self._end(verdict)

    def stopping(self, reason: str, exit_code: int) -> None:
        """Tell the other ranks that this one ends in good order. Never returns if it is ending for another reason."""
        self._ending.acquire()
        if self.judge is not None:
            self.judge.stop(reason, exit_code)

    def launcher_gone(self, noticed: str) -> NoReturn:
        """End the process because its launcher is gone. Nobody reads its output, but other hosts hear of it."""
        self._ending.acquire()
        report = self.folder.of_lost_launcher(self.info, noticed)
        within(_WRITE_SECONDS, lambda: self.folder.write(report), report)
        judge = self.judge
        if judge is not None:
            within(_LAST_WORD_SECONDS, lambda: judge.fail(report), None)
        end_process(report.exit_code)

    def _end(self, verdict: Verdict) -> NoReturn:
        self._show(verdict)
        if self.judge is not None:
            self.judge.pass_on()
        end_process(verdict.exit_code)

    def _show(self, verdict: Verdict) -> None:
        """Show the verdict on rank 0; on other hosts one line, from their first rank that is left."""
        info = self.info
        if verdict.coordinator_lost and self._shows_verdict:
            if info.local_rank == int(self._beside_rank_0):
                self._print(f"error: {self._without_rank_0(verdict.coordinator_lost)}")
            return
        in_good_order = verdict.exit_code in _IN_GOOD_ORDER
        if self._shows_verdict and info.rank == 0:
            self._print(verdict.text if in_good_order else f"error: {verdict.text}")
        if info.rank == 0 or in_good_order:
            return
        at_fault = verdict.rank == info.rank - 1 and verdict.host == info.node
        first_left = info.local_rank == 0 or (info.local_rank == 1 and at_fault)
        if first_left and verdict.rank >= 0 and not self._beside_rank_0:
            self._print(describe_end(info.node, verdict.text))

    @property
    def _beside_rank_0(self) -> bool:
        """Whether rank 0 runs on this host; where the launcher does not say, hosts hold successive ranks."""
        info = self.info
        return info.node_rank == 0 if info.node_rank is not None else info.rank == info.local_rank

    def _without_rank_0(self, reason: str) -> str:
        host = self.info.node if self._beside_rank_0 else self.info.master_addr
        lines = [f"{self._layout.describe(0)} on {host} vanished: {reason}"]
        if progress.step is not None:
            lines.append(f"rank {self.info.rank} was after step {progress.step}: {progress.activity}")
        return "\n  ".join(lines)

    def _print(self, text: str) -> None:
        within(_SAY_SECONDS, lambda: self._say(text), None)


def run_rank(worker: Callable[..., int], end: RankEnd, *, arguments: Sequence[Any] = ()) -> int:
    """Run `worker(info, *arguments)` as one rank of a launcher, or as the only rank; return its exit code.

    An exception ends the process with the report's exit code, 2 for the user's input, else 1. A single rank that
    `megalite launch` does not watch raises instead: MegaliteError unchanged, RankFailure for any other exception.
    """
    info, folder = end.info, end.folder
    folder.clear([info.rank])
    export_rank(info)
    try:
        return worker(info, *arguments)
    except Exception as error:
        if meets_others(info):
            end.failed(error)
        report = folder.write(folder.of_exception(info, error))
        if isinstance(error, MegaliteError):
            raise
        raise RankFailure(describe_own(report, ()), report.exit_code) from error


def _start_of(info: RankInfo) -> str:
    """Identify this start of the job; torchrun's id may come again, as its user chooses it."""
    if info.job and info.launcher != "torchrun":
        return info.job
    return f"{info.node} {identity(os.getppid())}"
