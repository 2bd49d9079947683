"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: the run saves a checkpoint before it ends, and says how to resume."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from megalite.checkpoint.folder import find_latest, progress_of_saves
from megalite.config.sections.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.exit_codes import INTERRUPTED, NOT_BEGUN, SAME_PRESS_SECONDS, STOPPED, TERMINATED
from megalite.launcher.local import ENDING, Terminated
from megalite.launcher.process import caught_signals, leave_closed_terminal, unwritten_output_dropped
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import meets_others
from megalite.monitor.console import announce

# Ctrl-C first: a launcher may send both.
NAMES = {signal.SIGINT: "Ctrl-C", **{each: each.name for each in ENDING}}
# A launcher passes a signal on that the terminal has sent to each rank already.
_PASSED_ON_SECONDS = 1.0
# For ranks to meet that are being started together; short, as launchers send SIGTERM after a failure too.
_MEETING_SECONDS = 2.0
# A save is looked at this often in the grace time, and at least once in _LONGEST_LOOK_SECONDS.
_LOOKS = 8
_LONGEST_LOOK_SECONDS = 20.0


def _raise(number: int, frame: FrameType | None) -> None:
    # Batch systems repeat a signal: the clean-up behind the first one goes on.
    ignore_repeated_signals()
    if number == signal.SIGHUP:
        leave_closed_terminal()
    raise Terminated


@contextmanager
def termination_raised(info: RankInfo | None) -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGHUP raise Terminated where no launcher started this process.

    The process trains alone or starts the ranks; a launcher's rank has StopSignals instead.
    """
    ours = _replaceable(ENDING) if info is None else []
    for number in ours:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _raise:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Give SIGTERM, SIGUSR1 and SIGHUP back to the caller after the `with` block, as they were before."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def ignore_repeated_signals() -> None:
    """Ignore further SIGTERM, SIGUSR1 and SIGHUP, unless the user handles them: this process is ending."""
    for number in _replaceable(ENDING):
        signal.signal(number, signal.SIG_IGN)


def _replaceable(numbers: "tuple[signal.Signals, ...]") -> list[signal.Signals]:
    """Return the signals that neither the user nor a native library handles or ignores; none outside of the main
    thread, which alone may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        return []
    free = (signal.SIG_DFL, signal.default_int_handler, _raise)
    # A handler in native code, such as faulthandler's, looks like SIG_DFL to Python.
    native = {number for number in caught_signals() if signal.getsignal(number) is signal.SIG_DFL}
    return [number for number in numbers if signal.getsignal(number) in free and number not in native]


class _Phase(Enum):
    FIRST_STEP = "up to the end of the first step of this start: there is nothing to save"
    TRAINING = "a signal lets the run save and end between two steps"
    SAVED = "every step is saved; the export may remain"


class RankStart(Enum):
    ALONE = "the only rank, in the process of the user"
    LOCAL = "a process of ours started it with the others"
    LAUNCHED = "a launcher started it"
    MEETING = "a launcher started it, and on_end will be called, once it has met the others"


class StopSignals:
    """Notes SIGTERM, SIGUSR1, SIGHUP and SIGINT in the `with` block of a rank's whole life.

    Called between two steps, it returns the first signal that has arrived, or None. Before the end of the first step
    there is nothing to save, so a signal ends the rank at once: with exit code 76 (SIGINT: 130), or by Terminated
    (KeyboardInterrupt) where the process trains alone. A second Ctrl-C ends the rank at once; other signals count once,
    since batch systems repeat them. After SIGHUP nothing is printed to a terminal that has closed. A rank is also ended
    when its grace time passes without the end of the run and without progress of a save. Signals that the user handles
    or ignores are left alone; so are all outside of the main thread. After a signal, all but SIGINT stay ignored: the
    process is ending.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        end_process: Callable[[int], None],
        *,
        grace_seconds: float,
        start: RankStart = RankStart.LOCAL,
        saves: Callable[[], object] = lambda: None,
    ):
        """
        say: called with a line for the user. end_process: called with the exit code. Both are called in a thread, since
        the main one may wait for other ranks for ever.
        saves: returns a value that changes while any rank writes a checkpoint.
        """
        self._say, self._end_process = say, end_process
        self._grace_seconds, self._start, self._saves = grace_seconds, start, saves
        self._alone = start is RankStart.ALONE
        self._phase = _Phase.FIRST_STEP
        self._noted: signal.Signals | None = None
        self._first = self._alive = 0.0
        self._save_seen = False
        self._ours: list[signal.Signals] = []
        self._over = threading.Event()
        self._tell_others: Callable[[str, int], object] = lambda reason, code: None
        self._met = threading.Event()

    def __call__(self) -> signal.Signals | None:
        """Return the first signal that has arrived."""
        return self._noted

    def first_step_over(self) -> None:
        """From now on a signal lets the run save. To be called right after a collective, so that ranks agree."""
        self._phase = _Phase.TRAINING

    def on_end(self, call: Callable[[str, int], object]) -> None:
        """Have `call(reason, exit code)` tell the other ranks before this one is ended; from a thread."""
        self._tell_others = call
        self._met.set()

    def all_saved(self) -> None:
        """From now on nothing is left to save."""
        self._phase = _Phase.SAVED

    def __enter__(self) -> "StopSignals":
        self._ours = _replaceable(tuple(NAMES))
        if not self._ours:
            return self
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        # By its number in a pipe: that arrives where the main thread hangs in a collective, and runs no Python code.
        self._previous_sender = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in self._ours}
        for number in self._ours:
            # Not every library goes on with a system call that was cut short.
            signal.siginterrupt(number, False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ours:
            return
        for number, handler in self._previous.items():
            ends = self._noted is not None and number in ENDING
            signal.signal(number, signal.SIG_IGN if ends else handler)
        signal.set_wakeup_fd(self._previous_sender)
        self._over.set()
        os.close(self._sender)
        self._thread.join()
        os.close(self._receiver)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread where nobody waits for this process; else the thread does all."""
        if number == signal.SIGHUP:
            leave_closed_terminal()
        ends = self._alone and self._phase is _Phase.FIRST_STEP
        if number == signal.SIGINT and (ends or self._phase is _Phase.SAVED):
            raise KeyboardInterrupt
        if ends:
            ignore_repeated_signals()
            raise Terminated

    def _watch(self) -> None:
        while True:
            left = None
            if self._noted is not None:
                left = max(0.0, self._alive + self._grace_seconds - time.monotonic())
            if not select.select([self._receiver], [], [], left)[0]:
                # A save may have made progress during the wait.
                if time.monotonic() < self._alive + self._grace_seconds:
                    continue
                return self._out_of_time()
            numbers = os.read(self._receiver, 4096)
            arrived = [signal.Signals(number) for number in numbers if number in self._ours]
            if not numbers:
                return
            # The main thread, whose handler does so too, may hang in a collective.
            if signal.SIGHUP in arrived:
                leave_closed_terminal()
            if arrived and self._noted is None:
                self._first = self._alive = time.monotonic()
                self._noted = arrived[0]
                if self._begin_to_end(arrived[0]):
                    return
            elif signal.SIGINT in arrived and self._phase is not _Phase.SAVED and self._is_second_press():
                again = (
                    "again" if self._noted is signal.SIGINT else f"after {NAMES[self._noted or arrived[0]]}"
                )
                return self._give_up(f"Ctrl-C came {again}")

    def _begin_to_end(self, number: signal.Signals) -> bool:
        """Say what the first signal leads to; return whether the rank has been ended."""
        name, phase = NAMES[number], self._phase
        if phase is _Phase.FIRST_STEP:
            text = f"{name} before the end of the first step: the run ends, there is nothing to save"
            if not self._alone:
                self._end(text, INTERRUPTED if number is signal.SIGINT else NOT_BEGUN)
                return True
            self._say(text)
        elif phase is _Phase.SAVED:
            self._say(f"{name}: every step is saved; the run ends after the export")
        else:
            limit = f"without progress it is ended after {self._grace_seconds:g} s (launch.grace_seconds)"
            again = f"a second {name} ends it at once" if number is signal.SIGINT else limit
            self._say(f"{name}: the run saves and ends after this step; {again}")
        threading.Thread(target=self._look_at_saves, name="save progress", daemon=True).start()
        return False

    def _is_second_press(self) -> bool:
        launched = self._start in (RankStart.LAUNCHED, RankStart.MEETING)
        apart = _PASSED_ON_SECONDS if launched else SAME_PRESS_SECONDS
        return time.monotonic() - self._first >= apart

    def _look_at_saves(self) -> None:
        """Stop the clock of the grace time while a save makes progress; in a thread, since a dead disk may hang."""
        every, last = min(self._grace_seconds / _LOOKS, _LONGEST_LOOK_SECONDS), self._saves()
        while not self._over.wait(every):
            now = self._saves()
            if now != last:
                self._alive, self._save_seen = time.monotonic(), True
            last = now

    def _out_of_time(self) -> None:
        limit = f"{self._grace_seconds:g} s (launch.grace_seconds)"
        assert self._noted is not None
        if self._phase is _Phase.SAVED:
            text = f"ended before the export was written: it was not over {limit} after {NAMES[self._noted]}"
            return self._end(text, STOPPED)
        if self._save_seen:
            return self._give_up(f"the checkpoint stood still for {limit}")
        self._give_up(f"the run was not over {limit} after {NAMES[self._noted]}")

    def _give_up(self, reason: str) -> None:
        code = INTERRUPTED if self._noted is signal.SIGINT else TERMINATED
        self._end(f"ended without saving a checkpoint: {reason}", code)

    def _end(self, text: str, code: int) -> None:
        if self._start is RankStart.MEETING:
            # Ranks that got no signal would wait for one that leaves before it has met them.
            self._met.wait(_MEETING_SECONDS)
        with suppress(Exception):  # the others may be gone
            # It does not return where a failure ends the rank already: launchers send SIGTERM then.
            self._tell_others(text, code)
        self._say(text)
        self._end_process(code)


def tell_interruption(config: RunConfig, info: RankInfo | None) -> None:
    """Announce, from rank 0, what is saved and how to resume."""
    if info is None or info.rank == 0:
        _say(f"interrupted: {what_is_left(config)}")


def _say(text: str) -> None:
    with unwritten_output_dropped(of_full_disk=True):
        announce(text)


def what_is_left(config: RunConfig) -> str:
    """Return which checkpoint is the last, and how to go on from it."""
    folder = Path(config.run.folder) / "checkpoints"
    try:
        last = find_latest(folder)
    except CheckpointError as error:
        return str(error)
    again = 'checkpoint.resume = "auto" resumes from it'
    if config.checkpoint.resume == "auto":
        again = "the same command, or a requeue of the job, resumes from it"
    if last is None:
        return f"{folder} has no checkpoint yet; the same command, or a requeue of the job, starts from the beginning"
    return f"the last checkpoint is {last}; {again}"


def stop_signals(config: RunConfig, info: RankInfo) -> StopSignals:
    """Return the StopSignals of one rank."""
    return StopSignals(
        _say if info.rank == 0 else lambda _: None,
        partial(_end_process, config, info),
        grace_seconds=config.launch.grace_seconds,
        start=_start_of(config, info),
        saves=partial(progress_of_saves, Path(config.run.folder) / "checkpoints"),
    )


def _start_of(config: RunConfig, info: RankInfo) -> RankStart:
    if info.launcher != "megalite":
        return RankStart.MEETING if meets_others(info) else RankStart.LAUNCHED
    return RankStart.ALONE if _is_alone(config, info) else RankStart.LOCAL


def _is_alone(config: RunConfig, info: RankInfo) -> bool:
    """Whether it is the only rank, in the process of the user: one that may start again has its own."""
    return info.launcher == "megalite" and info.world_size == 1 and not config.launch.restarts


def _end_process(config: RunConfig, info: RankInfo, code: int) -> None:
    """End this rank from any thread: its main thread may wait for other ranks for ever."""
    # Ranks that a process of ours started leave the last line to that process.
    if info.launcher != "megalite" or _is_alone(config, info):
        with suppress(Exception):
            tell_interruption(config, info)
    os._exit(code)
