"""Runs one attempt of a job: starts a backend's commands, listens to the ranks, and ends all that was started."""

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType

from megalite.errors import LaunchError
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.messages import PASSED_ON, Verdict
from megalite.launcher.exit_codes import INTERRUPTED, NOT_BEGUN, SAME_PRESS_SECONDS, STOPPED
from megalite.launcher.hosts.backends import Command, Start
from megalite.launcher.process import adopt_orphans, die_with_parent, kill_descendants, leave_closed_terminal
from megalite.launcher.rank.address import source_address

_POLL_SECONDS = 0.05
# A command that failed is the first cause only if no rank gives another one in this time.
_CAUSE_SECONDS = 3.0
# After a verdict the ranks end by themselves; their launchers get this long to follow.
_END_SECONDS = 5.0
# A launcher that has not ended by then, after all ranks have left in good order, is ended: MPICH may wait for ever.
_LEFT_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """How an attempt ended. text: the first cause, "" if the ranks ended in good order or have told it themselves.

    asked: whether SIGINT, SIGTERM, SIGUSR1 or SIGHUP asked for the end.
    """

    exit_code: int
    text: str = ""
    step: int | None = None
    asked: bool = False


def listen(hosts: Sequence[str]) -> socket.socket:
    """Return a listening socket on the address of this machine from which the hosts are reached.

    hosts: empty: this machine only. Raises LaunchError where no host has an address or a route.
    """
    address, reasons = "127.0.0.1" if not hosts else "", []
    for host in hosts:
        try:
            own = source_address(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            reasons.append(f"{host}: {error.strerror or error}")
            continue
        # This machine may know itself as 127.0.1.1, which other hosts cannot reach.
        if not address or address.startswith("127."):
            address = own
    if not address:
        raise LaunchError(
            f"this machine reaches none of the hosts ({'; '.join(reasons)}); use names that resolve here, or start "
            "megalite launch on a host of the job"
        )
    try:
        return socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
    except OSError as error:
        raise LaunchError(f"this machine cannot listen on {address}: {error.strerror}") from error


def supervise(
    start: Start,
    coordinator: Coordinator | None,
    *,
    backend: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Result:
    """Run the commands to their end and return how the job ended; no process that they started on this machine is left.

    coordinator: not yet started; None if the ranks are children of a single command, which tells their failures.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to the ranks; a second SIGINT ends the job at once. If this
    process is killed, its commands are too, and the ranks lose the coordinator. Must be called from the main thread,
    without other children. Raises LaunchError if a command cannot be started.
    """
    adopt_orphans(True)
    with _signals() as received:
        attempt = _Attempt(start.commands, coordinator, backend, received, say)
        try:
            for path, text in start.files.items():
                path.write_text(text)
            attempt.start(environ)
            result = attempt.run()
            return replace(result, asked=attempt.asked)
        finally:
            kill_descendants()
            adopt_orphans(False)
            if coordinator is not None:
                coordinator.stop()


class _Attempt:
    """The processes of one attempt, from their start to the end of the last one."""

    def __init__(
        self,
        commands: Sequence[Command],
        coordinator: Coordinator | None,
        backend: str,
        received: "deque[int]",
        say: Callable[[str], None],
    ):
        self._commands, self._coordinator, self._backend = commands, coordinator, backend
        self._received, self._say = received, say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._interrupted: float | None = None
        self._sent: set[int] = set()

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the commands, each in a session of its own; then the coordinator, whose thread no fork must meet."""
        for command in self._commands:
            try:
                process = subprocess.Popen(
                    command.argv,
                    env={**environ, **command.environ},
                    # A host's command ends its ranks when its stdin is closed.
                    stdin=subprocess.PIPE if command.host else subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                raise LaunchError(
                    f"{command.argv[0]} cannot be started: {error.strerror}; install it, or use another --backend"
                ) from error
            self._processes.append(process)
        if self._coordinator is not None:
            self._coordinator.start()

    @property
    def asked(self) -> bool:
        """Whether a signal asked for the end."""
        return bool(self._sent or self._received or self._interrupted is not None)

    def run(self) -> Result:
        """Wait for the end of the job, and return it."""
        failed_at: float | None = None
        left_at: float | None = None
        while self._running() and self._verdict is None:
            self._pass_on()
            now = time.monotonic()
            if left_at is None and self._all_left:
                left_at = now
            if left_at is not None and now > left_at + _LEFT_SECONDS:
                self._say(f"{self._backend} has not ended {_LEFT_SECONDS:g} s after its ranks, and is ended")
                break
            if failed_at is None and any(process.returncode for process in self._processes):
                failed_at = now
            if failed_at is not None and now > failed_at + _CAUSE_SECONDS:
                self._blame_commands()
            time.sleep(_POLL_SECONDS)
        if self._coordinator is None:
            return self._own_result()
        if self._verdict is None:
            # The last words of the ranks are on their way.
            self._wait(_CAUSE_SECONDS, lambda: self._verdict is not None or self._all_left)
            if self._verdict is None and not self._all_left:
                self._blame_commands()
        self._wait(_END_SECONDS, lambda: not self._running())
        return self._result()

    @property
    def _verdict(self) -> Verdict | None:
        return self._coordinator.verdict if self._coordinator is not None else None

    @property
    def _all_left(self) -> bool:
        return self._coordinator is not None and self._coordinator.all_left

    def _running(self) -> bool:
        # A list: every process has to be asked.
        return None in [process.poll() for process in self._processes]

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._pass_on()
            time.sleep(_POLL_SECONDS)

    def _pass_on(self) -> None:
        """Pass received signals on to the ranks; end a job whose ranks have not all come, and one interrupted twice."""
        while self._received:
            number = self._received.popleft()
            if number == signal.SIGINT:
                now = time.monotonic()
                again = self._interrupted is not None
                if self._interrupted is not None and now - self._interrupted < SAME_PRESS_SECONDS:
                    continue
                self._interrupted = now
                if again and self._coordinator is not None:
                    self._coordinator.end(Verdict("the job was interrupted twice", INTERRUPTED))
                    continue
            self._sent.add(number)
            name = signal.Signals(number).name
            if self._coordinator is None:
                for process in self._processes:
                    with suppress(ProcessLookupError):
                        process.send_signal(number)
            elif self._coordinator.complete:
                self._say(f"{name} is passed on to all ranks")
                self._coordinator.signal(number)
            else:
                code = INTERRUPTED if number == signal.SIGINT else NOT_BEGUN
                self._coordinator.end(Verdict(f"{name} came before all ranks were here", code))

    def _blame_commands(self) -> None:
        """End the job because of a command of the backend, which no rank explains."""
        if self._coordinator is None:
            return
        failed = [
            (command, process.returncode)
            for command, process in zip(self._commands, self._processes, strict=True)
            if process.poll()
        ]
        for command, code in failed[:1]:
            where = f" for {command.host}" if command.host else ""
            text = f"{self._backend}: the command{where} {_how(code)}; its output is above"
            self._coordinator.end(Verdict(f"{text}{self._missing()}", 1, -1, command.host))
        if not failed:
            text = f"{self._backend} ended, but not all ranks ended in good order{self._missing()}"
            self._coordinator.end(Verdict(text, 1))
        self._wait(1.0, lambda: self._verdict is not None)

    def _missing(self) -> str:
        assert self._coordinator is not None
        return "" if self._coordinator.complete else f"; {self._coordinator.missing()} did not come"

    def _result(self) -> Result:
        assert self._coordinator is not None
        states = list(self._coordinator.ranks.values())
        step = max((state.step for state in states if state.step is not None), default=None)
        verdict = self._verdict
        if verdict is not None:
            text = verdict.text
            if self._coordinator.only_lost and not self._coordinator.complete:
                # The backend ended these ranks because of one that failed before it could tell anything.
                text = f"{self._backend} ended ranks before all were here; their output is above{self._missing()}"
            return Result(verdict.exit_code or 1, text, step)
        codes = {state.exit_code or 0 for state in states}
        if codes == {0}:
            codes = {1 if process.poll() else 0 for process in self._processes}
            if 1 in codes:
                code = next(process.returncode for process in self._processes if process.returncode)
                return Result(1, f"all ranks ended in good order, but {self._backend} {_how(code)}", step)
            return Result(0, "", step)
        return Result(STOPPED if codes <= {0, STOPPED} else max(codes), "", step)

    def _own_result(self) -> Result:
        """Return the end of a command that tells the failures of its ranks itself."""
        code = self._processes[0].returncode or 0
        if code >= 0:
            return Result(code)
        return Result(
            128 - code, "" if -code in self._sent else f"{self._backend}: megalite train {_how(code)}"
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    named = {int(number): number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({named.get(-code, 'unknown')})"


@contextmanager
def _signals() -> Iterator["deque[int]"]:
    """Collect the signals that are passed on inside of the `with` block; an ignored one stays ignored."""
    received: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        # SIGHUP has the ranks drop what they print: to a log it goes on.
        logged = number == signal.SIGHUP and not leave_closed_terminal()
        received.append(signal.SIGTERM if logged else number)

    watched = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in watched}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
