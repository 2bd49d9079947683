"""Starts all ranks of a job on this machine, watches them, and ends them together.

Local ranks are forked from a parent that has imported torch but has not computed with it: no CUDA context and no thread
pool crosses the fork, and torch is imported only once. A parent that has computed must spawn ranks instead: each is a
new Python process, which imports torch itself.
"""

import gc
import importlib
import math
import multiprocessing
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from megalite.errors import LaunchError, RankFailure
from megalite.launcher.control.failures import FailureFolder, FailureReport, first_cause
from megalite.launcher.control.hang import HangPolicy
from megalite.launcher.control.local_hangs import LocalHangs
from megalite.launcher.control.progress import Progress, progress
from megalite.launcher.control.rank_process import RankEnd, run_rank
from megalite.launcher.control.starter_folder import starter_folder
from megalite.launcher.control.verdicts import describe_job
from megalite.launcher.exit_codes import INTERRUPTED, NOT_BEGUN, SAME_PRESS_SECONDS, STOPPED, TERMINATED
from megalite.launcher.process import (
    adopt_orphans,
    children,
    die_with_parent,
    end_process,
    identity,
    is_stopped,
    keep_freed_memory,
    leave_closed_terminal,
    session,
)
from megalite.launcher.rank.detect import RankInfo, local_rank_infos
from megalite.launcher.rank.environment import export_rank, exported_rank
from megalite.topology.axes import Layout

# Called with the RankInfo and the job's arguments; returns the exit code: 0, STOPPED or NOT_BEGUN.
Worker = Callable[..., int]

_ORDERLY = (0, STOPPED, NOT_BEGUN)

# After a failure the other ranks get time to report theirs, then SIGKILL: a little after a first cause, more while all
# have only lost a peer, as the cause is still to come.
_AFTER_CAUSE_SECONDS, _AFTER_CONSEQUENCE_SECONDS = 0.3, 1.5
# Ranks that stop together end within this time: one that does not has lost the others, which were told alone.
_STOP_SECONDS = 15.0

# Batch systems send the first two before they end a job; a terminal that closes sends the last.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_WATCHED = (signal.SIGINT, *ENDING, signal.SIGCHLD)


class Terminated(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP where there is nothing to save, as KeyboardInterrupt is SIGINT."""


@dataclass(frozen=True)
class LocalStart:
    """How the ranks of a local job are started and watched.

    preload: modules to import before the fork; they must not start CUDA or compute on import. method: "spawn" starts
    each rank as a new Python process without preloading; worker and arguments must then be picklable. hangs: what
    follows when no rank moves; None: nobody watches. say: called with the report of a hang that does not end the job.
    apart: a single rank gets a process of its own too, which this one outlives.
    """

    preload: Sequence[str] = ("torch",)
    method: Literal["fork", "spawn"] = "fork"
    hangs: HangPolicy | None = None
    say: Callable[[str], None] = lambda _: None
    apart: bool = False


def run_local_ranks(
    worker: Worker,
    layout: Layout,
    failures: Path,
    *,
    arguments: Sequence[Any] = (),
    start: LocalStart | None = None,
) -> int:
    """Run every rank of `layout` on this machine as `worker(info, *arguments)` and return the exit code.

    The exit code is 0 if all ranks returned 0, else 75 or 76 as the ranks returned, if no rank failed by itself. After
    SIGTERM, SIGUSR1 or SIGHUP to this process, it is 143 if a rank ended without saving. They and the first SIGINT are
    passed on to the ranks, which may take their time to save; a second SIGINT kills them. Must be called from the main
    thread, for signals. A single rank runs in this process, as in `run_rank`, unless it is to run apart.

    failures: the folder for the reports of failed ranks.

    Raises RankFailure within 2 seconds of the first failure, and KeyboardInterrupt if Ctrl-C ended the ranks. In all
    cases, even if this process is killed, no rank is left running, nor a process that a rank has started, unless it
    has begun a session of its own. Other children of this process are left alone.
    """
    start = start or LocalStart()
    folder = FailureFolder(failures, layout, job=identity(os.getpid()))
    folder.clear()
    with starter_folder() as scratch:
        infos = local_rank_infos(layout.world_size, scratch / "rendezvous")
        if layout.world_size == 1 and not start.apart:
            with exported_rank(infos[0]):
                return run_rank(worker, RankEnd(infos[0], layout, failures), arguments=arguments)
        marks = scratch / "progress"
        Progress.create_file(marks, layout.world_size)
        for module in start.preload if start.method == "fork" else ():
            importlib.import_module(module)
        with _orphans_adopted(), JobSignals() as signals:
            alone = layout.world_size == 1  # no other rank waits for it
            watch = None if start.hangs is None or alone else LocalHangs(start.hangs, layout, marks)
            job = _LocalJob(infos, folder, signals, marks, watch)
            job.say = start.say
            try:
                job.start(worker, arguments, start.method)
                job.watch()
            finally:
                job.kill()
                job.kill_orphans()
        return job.outcome()


class JobSignals:
    """Counts SIGINT, and notes what else ends a job, in the `with` block; these and the end of a child wake `wait`."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations: list[signal.Signals] = []
        """Those of SIGTERM, SIGUSR1 and SIGHUP that came, in order."""
        self._interrupted = -math.inf

    def __enter__(self) -> "JobSignals":
        self._receiver, self._sender = os.pipe()
        for end in (self._receiver, self._sender):
            os.set_blocking(end, False)
        # nohup has SIGHUP ignored, and a shell's & SIGINT, which stays so.
        watched = [number for number in _WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._count) for number in watched}
        # A full pipe wakes `wait` too, so there is no need for the warning.
        self._previous_fd = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        os.close(self._receiver)
        os.close(self._sender)

    def restore(self) -> None:
        """Restore the previous handlers; a forked rank does this first."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most `seconds`."""
        if select.select([self._receiver], [], [], max(0.0, seconds))[0]:
            with suppress(BlockingIOError):
                os.read(self._receiver, 4096)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if number in ENDING:
            self.terminations.append(signal.Signals(number))
        if number == signal.SIGINT and time.monotonic() - self._interrupted >= SAME_PRESS_SECONDS:
            self.interrupts, self._interrupted = self.interrupts + 1, time.monotonic()


class _LocalJob:
    """The processes of one job, from their start to the end of the last one."""

    def __init__(
        self,
        infos: Sequence[RankInfo],
        folder: FailureFolder,
        signals: JobSignals,
        marks: Path,
        hangs: LocalHangs | None,
    ):
        self._infos, self._folder, self._signals, self._marks = infos, folder, signals, marks
        self._hangs, self._hang = hangs, ""
        self.say: Callable[[str], None] = lambda _: None
        self._running: dict[int, BaseProcess] = {}
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._sent: dict[int, set[int]] = {info.rank: set() for info in infos}
        self._kill_at = math.inf
        self._interrupts = 0
        self._terminations = 0

    def start(self, worker: Worker, arguments: Sequence[Any], method: Literal["fork", "spawn"]) -> None:
        """Start one process per rank; LaunchError if the system cannot start one."""
        context: Any = multiprocessing.get_context(method)
        # A forked rank inherits the signal handlers of this process, a spawned one does not.
        signals = self._signals if method == "fork" else None
        task = _RankTask(
            worker, arguments, os.getpid(), self._folder, signals, self._marks, self._hangs is not None
        )
        for info in self._infos:
            process: BaseProcess = context.Process(target=task.run, args=(info,), name=f"rank {info.rank}")
            try:
                with _signals_blocked(), warnings.catch_warnings():
                    # Python warns of forks in a process with threads; the threads of numpy's BLAS are fork-safe.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            except OSError as error:
                raise LaunchError(
                    f"rank {info.rank} of {len(self._infos)} cannot be started: {error.strerror}; use fewer "
                    "ranks on this machine, or raise its limits on processes (ulimit -u) and memory"
                ) from error
            self._running[info.rank] = process
            self._pids[info.rank] = process.pid or 0

    def watch(self) -> None:
        """Wait until every rank has ended or been killed."""
        while self._running:
            self._handle_signals()
            self._reap()
            self._look_for_hangs()
            left = self._kill_at - time.monotonic()
            if left <= 0:
                self._send(signal.SIGKILL)
            if self._running:
                # Signals wake the wait; the limit covers a signal between `_handle_signals` and here.
                self._signals.wait(0.5 if left <= 0 else min(0.5, left))

    def kill(self) -> None:
        """Kill all ranks that still run; none do after `watch`."""
        with _signals_blocked():
            self._send(signal.SIGKILL)
            for process in self._running.values():
                process.join()

    def kill_orphans(self) -> None:
        """Kill what the ended ranks have left running, such as data workers: all processes of the ranks' sessions."""
        sessions = set(self._pids.values())
        # The children of a killed orphan become orphans in turn, hence the loop.
        while orphans := [child for child in children() if session(child) in sessions]:
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def outcome(self) -> int:
        """Return the exit code of the job; RankFailure with the first cause, KeyboardInterrupt after Ctrl-C."""
        asked = bool(self._signals.interrupts or self._signals.terminations)
        if self._hang:
            raise RankFailure(self._hang, 1, asked=asked)
        codes = set(self._codes.values())
        if codes <= set(_ORDERLY):
            return max(codes)
        # A second Ctrl-C killed the ranks, or each saved and ended after the first.
        if self._signals.interrupts > 1 or codes == {INTERRUPTED}:
            raise KeyboardInterrupt
        reports = self._reports()
        if all(report.secondary for report in reports):
            if self._signals.interrupts:
                raise KeyboardInterrupt
            # The others lost a rank that had stopped.
            if TERMINATED not in codes and codes & {STOPPED, NOT_BEGUN}:
                return STOPPED if STOPPED in codes else NOT_BEGUN
            if self._signals.terminations:
                return TERMINATED
        cause = describe_job(reports, len(self._infos))
        raise RankFailure(cause, first_cause(reports).exit_code, asked=asked)

    def _reports(self) -> list[FailureReport]:
        reports = {report.rank: report for report in self._folder.read()}
        for rank, code in self._codes.items():
            caused_by_us = -code in self._sent[rank] or code - 128 in self._sent[rank]
            caused_by_us |= code == TERMINATED and bool(self._signals.terminations)
            if code not in _ORDERLY and rank not in reports and not caused_by_us:
                left = Progress.read(self._marks, self._infos[rank].local_rank)
                report = self._folder.of_exit(
                    self._infos[rank], self._pids[rank], code, self._ended[rank], left
                )
                reports[rank] = self._folder.write(report)
        return list(reports.values())

    def _handle_signals(self) -> None:
        if self._signals.interrupts > self._interrupts:
            # The ranks have sessions of their own, so the terminal's SIGINT does not reach them.
            if self._interrupts == 0:
                self._tell(signal.SIGINT)
            if self._signals.interrupts > 1:
                self._kill_at = 0.0
            self._interrupts = self._signals.interrupts
        # No escalation to SIGKILL: the ranks may be saving a checkpoint.
        for number in self._signals.terminations[self._terminations :]:
            self._terminations += 1
            self._tell(number)

    def _reap(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.exitcode
            if code is None:
                continue
            del self._running[rank]
            self._codes[rank], self._ended[rank] = code, time.time()
            if code != 0:
                self._kill_at = min(self._kill_at, time.monotonic() + self._grace_seconds(rank, code))

    def _look_for_hangs(self) -> None:
        if self._hangs is None or self._hang or self._signals.interrupts:
            return
        seen = self._hangs.look({rank: self._pids[rank] for rank in self._running})
        if seen is None:
            return
        report, ends = seen
        if ends:
            self._hang, self._kill_at = report, 0.0
        else:
            self.say(report)

    def _grace_seconds(self, rank: int, code: int) -> float:
        """Return how long the other ranks may run after this one ended with a code that is not 0."""
        if code in _ORDERLY:
            return _STOP_SECONDS
        signalled = self._signals.interrupts or self._signals.terminations
        if signalled or any(report.rank == rank and report.secondary for report in self._folder.read()):
            return _AFTER_CONSEQUENCE_SECONDS
        return _AFTER_CAUSE_SECONDS

    def _tell(self, number: signal.Signals) -> None:
        """Pass a signal on. Where all ranks are stopped they go on: none is left to end the job in its grace time."""
        self._send(number)
        if all(is_stopped(process.pid or 0) for process in self._running.values()):
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank, process in self._running.items():
            self._sent[rank].add(number)
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)


@dataclass(frozen=True)
class _RankTask:
    """The work of each new process of a job.

    signals: the inherited handlers, if forked. marks: the file that keeps the marks of `progress`. tells_stacks:
    whether the parent may ask for the rank's stacks.
    """

    worker: Worker
    arguments: Sequence[Any]
    parent: int
    folder: FailureFolder
    signals: JobSignals | None
    marks: Path
    tells_stacks: bool

    def run(self, info: RankInfo) -> NoReturn:
        """Run a rank in a new process, whose signals are blocked at first."""
        code = 1
        try:
            die_with_parent(self.parent)
            # Ctrl-C reaches the parent alone, which decides; and its other children differ from those of the ranks.
            os.setsid()
            if self.signals is None:
                keep_freed_memory()
            else:
                # A collection writes to every object it looks at, which would copy the parent's: 80 MB with DeepSpeed.
                gc.freeze()
                self.signals.restore()
            progress.restart()
            progress.keep_in(self.marks, info.local_rank)
            if self.tells_stacks:
                LocalHangs.answer(self.marks, info.local_rank)
            export_rank(info)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            code = self.worker(info, *self.arguments)
        except KeyboardInterrupt:
            end_process(INTERRUPTED)
        except Terminated:
            end_process(NOT_BEGUN)
        except SystemExit:
            raise
        except BaseException as error:
            report = self.folder.of_exception(info, error)
            self.folder.write(report)
            end_process(report.exit_code)
        sys.exit(code)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the watched signals inside of the `with` block; a process forked in it must unblock them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _orphans_adopted() -> Iterator[None]:
    """Make orphaned descendants children of this process inside of the `with` block."""
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)
