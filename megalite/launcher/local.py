"""Runs the ranks of a job: starts those of this machine, or is one that a launcher started.

The ranks are forked from a parent that has imported torch once and computed nothing with it: no CUDA context
and no thread pool crosses the fork, and eight ranks start in the time of one. Ranks of a parent that has computed
are spawned: each is a new Python, which imports torch for itself.
"""

import importlib
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from megalite.errors import LaunchError, MegaliteError
from megalite.launcher.detect import RankInfo, local_rank_infos
from megalite.launcher.environment import export_rank, exported_rank
from megalite.launcher.failures import FailureFolder, FailureReport
from megalite.launcher.process import adopt_orphans, children, die_with_parent, identity, keep_freed_memory
from megalite.topology.axes import Layout

# A worker is called with its rank and the job's arguments, and returns the exit code: 0, or STOPPED.
Worker = Callable[..., int]

STOPPED = 75  # stopped in good order and wants to be resumed
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
_IN_GOOD_ORDER = (0, STOPPED)

# After the first failure the others may report their own cause, then are told to end, then are made to.
_GRACE_SECONDS = 1.5
_TERMINATION_SECONDS = 1.0
_INTERRUPTION_SECONDS = 1.0
_EXIT_SECONDS = 3

# These start ranks from their main thread and leave them behind when killed. (For the daemons of MPI and SLURM neither
# holds, and the kernel takes the end of the thread that started a process for the end of its parent.)
_DIRECT_PARENTS = ("torchrun", "deepspeed")

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def run_local_ranks(
    worker: Worker,
    layout: Layout,
    failures: Path,
    *,
    arguments: Sequence[Any] = (),
    preload: Sequence[str] = ("torch",),
    method: Literal["fork", "spawn"] = "fork",
) -> int:
    """Run every rank of `layout` on this machine as `worker(info, *arguments)` and return the exit code.

    0: all ranks returned 0. 75: all returned, at least one with 75. 143: this process was sent SIGTERM, and
    passed it on. `preload` names the modules to import before the fork; none may start CUDA or compute on
    import. `failures` gets one file a failed rank. Needs the main thread, for signals. `method` "spawn" starts
    each rank as a new Python: `worker` and `arguments` must pickle then, and nothing is preloaded.

    Raises RankFailure, within 5 seconds of the first failure, and KeyboardInterrupt after Ctrl-C. Either way
    no rank goes on running, nor what a rank started; nor does a rank when this process is killed.
    A single rank runs in this process, as in `run_rank`.
    """
    folder = FailureFolder(failures, layout, job=identity(os.getpid()))
    folder.clear()
    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as scratch:
        infos = local_rank_infos(layout.world_size, Path(scratch) / "rendezvous")
        if layout.world_size == 1:
            with exported_rank(infos[0]):
                return run_rank(worker, infos[0], layout, failures, arguments=arguments)
        for module in preload if method == "fork" else ():
            importlib.import_module(module)
        with _orphans_killed(), _Signals() as signals:
            job = _LocalJob(infos, folder, signals)
            try:
                job.start(worker, arguments, method)
                job.watch()
            finally:
                job.kill()
        return job.outcome()


def run_rank(
    worker: Worker, info: RankInfo, layout: Layout, failures: Path, *, arguments: Sequence[Any] = ()
) -> int:
    """Be the rank `info` that a launcher started, or the only one: `worker(info, *arguments)`, its exit code.

    Raises RankFailure for an exception: the whole block from the rank that failed first, one line from those
    that only lost a peer. For the caller to show before it exits, which it has a few seconds to do: whatever
    hangs then, such as the end of a broken communicator, must not keep the launcher from seeing this rank
    fail. A MegaliteError of the only rank is raised as it is.
    """
    folder = FailureFolder(failures, layout, job=info.job or f"{info.node} {identity(os.getppid())}")
    folder.clear([info.rank])
    if info.launcher in _DIRECT_PARENTS:
        die_with_parent(os.getppid())
    export_rank(info)
    try:
        return worker(info, *arguments)
    except Exception as error:
        report = folder.of_exception(info, error)
        folder.write(report)
        if layout.world_size == 1 and isinstance(error, MegaliteError):
            raise
        if layout.world_size > 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_EXIT_SECONDS)
        raise folder.own_failure(report) from error


class _Signals:
    """While entered, counts SIGINT and SIGTERM, and wakes `wait` for them and for the end of a child."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0

    def __enter__(self) -> "_Signals":
        self._receiver, self._sender = os.pipe()
        for end in (self._receiver, self._sender):
            os.set_blocking(end, False)
        self._previous = {number: signal.signal(number, self._count) for number in _WATCHED}
        # A full pipe wakes as well as an empty one would.
        self._previous_fd = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        os.close(self._receiver)
        os.close(self._sender)

    def restore(self) -> None:
        """Handlers as they were; a forked rank starts with this."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def wait(self, seconds: float) -> None:
        """Return when a signal arrived, at the latest after `seconds`."""
        if select.select([self._receiver], [], [], max(0.0, seconds))[0]:
            with suppress(BlockingIOError):
                os.read(self._receiver, 4096)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        self.terminations += number == signal.SIGTERM


class _LocalJob:
    """The ranks of one job, from the fork to the last one's end."""

    def __init__(self, infos: Sequence[RankInfo], folder: FailureFolder, signals: _Signals):
        self._infos, self._folder, self._signals = infos, folder, signals
        self._running: dict[int, BaseProcess] = {}
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._sent: dict[int, set[int]] = {info.rank: set() for info in infos}
        self._escalation: list[tuple[float, signal.Signals]] = []
        self._interrupts = 0
        self._terminations = 0

    def start(self, worker: Worker, arguments: Sequence[Any], method: Literal["fork", "spawn"]) -> None:
        """Start one process a rank. Raises LaunchError when the system refuses one."""
        parent = os.getpid()
        context: Any = multiprocessing.get_context(method)
        # A forked rank has this process's handlers, a spawned one none.
        signals = self._signals if method == "fork" else None
        for info in self._infos:
            process: BaseProcess = context.Process(
                target=_be_rank,
                args=(worker, info, arguments, parent, self._folder, signals),
                name=f"rank {info.rank}",
            )
            try:
                with _signals_held(), warnings.catch_warnings():
                    # Python warns of forks beside threads; those of numpy's BLAS are made for it.
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
        """Return when every rank has ended, by itself or made to."""
        while self._running:
            self._heed_signals()
            self._reap()
            now = time.monotonic()
            while self._escalation and self._escalation[0][0] <= now:
                self._send(self._escalation.pop(0)[1])
            if self._running:
                # Wakes for a signal; the limit is for a signal handled between the look and the wait.
                self._signals.wait(min(0.5, self._escalation[0][0] - now) if self._escalation else 0.5)

    def kill(self) -> None:
        """Leave nothing running; without effect after `watch`."""
        with _signals_held():
            self._send(signal.SIGKILL)
            for process in self._running.values():
                process.join()

    def outcome(self) -> int:
        """The job's exit code. Raises RankFailure with the first cause, KeyboardInterrupt after Ctrl-C."""
        if self._signals.interrupts:
            raise KeyboardInterrupt
        if all(code in _IN_GOOD_ORDER for code in self._codes.values()):
            return STOPPED if STOPPED in self._codes.values() else 0
        reports = self._reports()
        if self._signals.terminations and all(report.secondary for report in reports):
            return TERMINATED
        raise self._folder.failure(reports)

    def _reports(self) -> list[FailureReport]:
        reports = {report.rank: report for report in self._folder.read()}
        for rank, code in self._codes.items():
            as_told = -code in self._sent[rank] or code - 128 in self._sent[rank]
            if code not in _IN_GOOD_ORDER and rank not in reports and not as_told:
                reports[rank] = self._folder.of_exit(
                    self._infos[rank], self._pids[rank], code, self._ended[rank]
                )
                self._folder.write(reports[rank])
        return list(reports.values())

    def _heed_signals(self) -> None:
        if self._signals.interrupts > self._interrupts:
            # The terminal sent it to the ranks as well. Once more means now.
            first, self._interrupts = self._interrupts == 0, self._signals.interrupts
            self._end_all_after(
                _INTERRUPTION_SECONDS if first else 0.0, 0.0 if not first else _TERMINATION_SECONDS
            )
        if self._signals.terminations > self._terminations:
            # However long a checkpoint takes: whoever sent it knows when to kill. SLURM sends it more than
            # once.
            self._terminations = self._signals.terminations
            self._send(signal.SIGTERM)

    def _reap(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.exitcode
            if code is None:
                continue
            del self._running[rank]
            self._codes[rank], self._ended[rank] = code, time.time()
            if code not in _IN_GOOD_ORDER and not self._escalation:
                self._end_all_after(_GRACE_SECONDS, _TERMINATION_SECONDS)

    def _end_all_after(self, grace: float, termination: float) -> None:
        term = time.monotonic() + grace
        self._escalation = [(term, signal.SIGTERM), (term + termination, signal.SIGKILL)]

    def _send(self, number: signal.Signals) -> None:
        for rank, process in self._running.items():
            self._sent[rank].add(number)
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)


def _be_rank(
    worker: Worker,
    info: RankInfo,
    arguments: Sequence[Any],
    parent: int,
    folder: FailureFolder,
    signals: _Signals | None,
) -> NoReturn:
    """A rank's whole life, signals held at its start. signals: the handlers that a forked rank has to leave."""
    code = 1
    try:
        die_with_parent(parent)
        if signals is None:
            keep_freed_memory()
        else:
            signals.restore()
        export_rank(info)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        code = worker(info, *arguments)
    except KeyboardInterrupt:
        _end_now(INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:
        report = folder.of_exception(info, error)
        folder.write(report)
        _end_now(report.exit_code)
    sys.exit(code)


def _end_now(code: int) -> NoReturn:
    """End without the tidying up that could wait for a peer that is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait until this process leaves the block; one forked within it must let them in itself."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _orphans_killed() -> Iterator[None]:
    """What the ranks started and left behind, such as data workers of a killed rank, is killed at the end."""
    before = children()
    adopt_orphans(True)
    try:
        yield
    finally:
        # Killing one hands its own children over, so until none is left.
        while orphans := children() - before:
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)
        adopt_orphans(False)
