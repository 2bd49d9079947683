"""A rank's connection to the coordinator of its job."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megalite.errors import LaunchError
from megalite.launcher.control.connection import (
    ALIVE_SECONDS,
    RendezvousLimits,
    alive_seconds,
    watch_link,
    why_lost,
)
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.hang import own_stacks
from megalite.launcher.control.messages import Hello, LineReader, MessageError, Verdict, encode

NOTE_SECONDS = 10.0
"""The time after which a rank says what it waits for."""
_ATTEMPT_SECONDS, _PAUSE_SECONDS = 5.0, 0.25
_VERDICT_SECONDS = 4.0
# Longer than rank 0 waits for its port (5 s), and an earlier job of the same port needs to end.
_STRANGER_SECONDS = 15.0

_NO_PROGRESS: Mapping[str, Any] = {"step": None, "activity": "", "marks": {}}

Find = Callable[[], tuple[str, int, str]]


@dataclass(frozen=True)
class RankCalls:
    """The functions that the connection of a rank calls.

    say: with a line for the user: what the rank waits for, after 10 s. progress: every `alive_seconds`, for
    the coordinator. ended: in another thread, with the verdict when another rank failed, or the coordinator is gone, so
    that it can end the process; None: `Member.wait` and `agree` raise JobEnded instead.
    """

    say: Callable[[str], None] = lambda _: None
    progress: Callable[[], Mapping[str, Any]] | None = None
    ended: Callable[[Verdict], None] | None = None


NO_CALLS = RankCalls()


class JobEnded(LaunchError):
    """The job has ended while this rank waited for the others."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.text)
        self.verdict, self.exit_code = verdict, verdict.exit_code


class NotJoined(LaunchError):
    """The coordinator of this job cannot be reached, or does not take this rank."""

    exit_code = 1


class Member:
    """One rank among the ranks of its job; made by `join`."""

    def __init__(
        self,
        connection: socket.socket,
        reader: LineReader,
        hello: Hello,
        calls: RankCalls,
        heartbeat_seconds: float,
    ):
        self.hello = hello
        # The seconds without an answer after which the coordinator counts as silent; it answers each message.
        self._longest_silence = heartbeat_seconds + alive_seconds(hello.world_size) - ALIVE_SECONDS
        self._heard = self._looked = time.monotonic()
        self._silent = False
        self.verdict: Verdict | None = None
        self.local_address: str = connection.getsockname()[0]
        """The address of this machine on the route to the coordinator."""
        self.coordinator_address: str
        self.coordinator_port: int
        self.coordinator_address, self.coordinator_port = connection.getpeername()[:2]
        self._socket, self._reader, self._calls = connection, reader, calls
        self._values: dict[str, Any] = {}
        self._unread: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._reporting = self._left = False
        self._thread = threading.Thread(target=self._watch, name="job", daemon=True)

    @classmethod
    def join(
        cls, find: Find, hello: Hello, limits: RendezvousLimits, calls: RankCalls = NO_CALLS
    ) -> "Member":
        """Connect to the coordinator, trying again until it takes this rank.

        find: returns address, port and nonce, asked before each attempt, as they may change. Raises NotJoined after
        `limits.rendezvous_seconds`, at once where no attempt can help, and soon where only another program answers
        there: rank 0 gives up too at a port that is taken.
        """
        began, said = time.monotonic(), False
        stranger_since: float | None = None
        while True:
            address, port, nonce = "", 0, ""
            try:
                address, port, nonce = find()
                whole = Hello(**{**asdict(hello), "nonce": nonce})
                connection, reader, rest = _attempt((address, port), whole, limits.heartbeat_seconds)
            except (OSError, MessageError, _Refused) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if isinstance(error, _Refused) and error.final:
                    raise NotJoined(reason) from error
                if not isinstance(error, (MessageError, _Refused)):
                    stranger_since = None
                elif stranger_since is None:
                    stranger_since = time.monotonic()
            else:
                member = cls(connection, reader, whole, calls, limits.heartbeat_seconds)
                member._unread = rest
                member._thread.start()
                return member
            waited = time.monotonic() - began
            where = f"{address}:{port}" if address else "rank 0"
            who = f"rank {hello.rank} on {hello.host}"
            if waited >= limits.rendezvous_seconds:
                raise NotJoined(
                    f"{who} did not reach the coordinator of the job at {where} within {limits.rendezvous_seconds:g} s "
                    f"(launch.rendezvous_seconds): {reason}; check that rank 0 runs, that MASTER_ADDR and MASTER_PORT "
                    "are the same on every host, and that no firewall is between them"
                )
            if stranger_since is not None and time.monotonic() - stranger_since >= _STRANGER_SECONDS:
                raise NotJoined(
                    f"{who} finds another program at {where}, the place of rank 0 (MASTER_ADDR, MASTER_PORT): "
                    f"{reason}; give the job a port that is free on that host"
                )
            if waited >= NOTE_SECONDS and not said:
                said = True
                calls.say(f"{who} waits for the coordinator of the job at {where} ({waited:.0f} s): {reason}")
            time.sleep(_PAUSE_SECONDS)

    def agree(self, name: str, facts: Mapping[str, str], about: str) -> None:
        """Compare facts with all other ranks; return once all are known to be equal.

        about: the rule that a difference breaks, and its remedy. A rank without facts has no part in the comparison.
        Raises JobEnded.
        """
        self._send("facts", name=name, facts=json.dumps(dict(facts), sort_keys=True), about=about)
        self.wait(name)

    def announce(self, name: str, value: Any) -> None:
        """Give all ranks a value of JSON's types, for their `wait`."""
        self._send("announce", name=name, value=value)

    def wait(self, name: str, note: Callable[[], None] | None = None) -> Any:
        """Return the value that a rank announced, without a limit of time. note: called once after 10 s.

        Raises JobEnded if the job ends before.
        """
        with self._changed:
            here = self._changed.wait_for(lambda: name in self._values or self.verdict, NOTE_SECONDS)
            if not here and note is not None:
                note()
            self._changed.wait_for(lambda: name in self._values or self.verdict)
            if name in self._values:
                return self._values[name]
            verdict = self.verdict
        assert verdict is not None
        if self._calls.ended is not None:
            self._thread.join()  # `ended` ends the process
        raise JobEnded(verdict)

    def hosts(self) -> list[str]:
        """Return the host of each rank, once all ranks have come. Raises JobEnded."""
        self._send("hosts")
        return [name for name, ranks in self.wait("hosts") for _ in range(ranks)]

    def fail(self, report: FailureReport) -> Verdict | None:
        """Send the failure of this rank and return the verdict on the job; None if none comes within 4 s."""
        self._reporting = True
        self._send("failed", report=asdict(report), sent=time.time())
        return self._await_verdict()

    def stop(self, text: str, exit_code: int) -> Verdict | None:
        """End the job on all ranks in good order, for a reason that is no failure."""
        self._reporting = True
        self._send("stop", text=text, exit_code=exit_code)
        return self._await_verdict()

    def leave(self, exit_code: int = 0) -> None:
        """Tell that this rank has done its work and ends with an exit code in good order: 0, or 75 to be resumed."""
        self._left = True
        self._send("leave", exit_code=exit_code)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _await_verdict(self) -> Verdict | None:
        with self._changed:
            self._changed.wait_for(lambda: self.verdict, _VERDICT_SECONDS)
            return self.verdict

    def _send(self, kind: str, **fields: Any) -> None:
        with self._sending, suppress(OSError):  # the loss is noticed where the answer is read
            self._socket.sendall(encode(kind, **fields))

    def _watch(self) -> None:
        beat = 0.0
        # Here and not in `join`: `ended` waits for what `join` returns.
        for message in self._unread:
            self._take(message)
        while self.verdict is None:
            if time.monotonic() >= beat and not self._left:
                beat = time.monotonic() + alive_seconds(self.hello.world_size)
                progress = self._calls.progress() if self._calls.progress else {}
                self._send("alive", **{**_NO_PROGRESS, **progress})
            try:
                received = self._socket.recv(2**16)
                if received:
                    self._heard, self._silent = time.monotonic(), False
                    for message in self._reader.feed(received):
                        self._take(message)
                    continue
                reason = why_lost()
            except TimeoutError:
                self._say_if_silent()
                continue
            except OSError as error:
                reason = why_lost(error)
            except MessageError as error:
                reason = str(error)
            if self._left:
                break
            where = f"the coordinator of the job at {self.coordinator_address}"
            self._end(Verdict(f"{where} vanished: {reason}", 1, coordinator_lost=reason))
        self._socket.close()

    def _say_if_silent(self) -> None:
        """Say that the coordinator is silent, once, on rank 1: rank 0 is where a thread of it coordinates."""
        now = time.monotonic()
        if now - self._looked > 2 * ALIVE_SECONDS:
            self._heard = now  # this process was stopped itself
        self._looked, seconds = now, now - self._heard
        if self.hello.rank != 1 or self._left or self._silent or seconds <= self._longest_silence:
            return
        self._silent = True
        self._calls.say(
            f"the coordinator of the job at {self.coordinator_address} has been silent for {seconds:.0f} s: the "
            "process of rank 0, or of megalite launch, is stopped, or busy outside of Python"
        )

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "value":
            with self._changed:
                self._values[message["name"]] = message["value"]
                self._changed.notify_all()
        elif message["kind"] == "signal":
            os.kill(os.getpid(), message["number"])
        elif message["kind"] == "where":
            self._send("stack", text=own_stacks())
        elif message["kind"] == "verdict":
            self._end(Verdict(**{name: message[name] for name in ("text", "exit_code", "rank", "host")}))

    def _end(self, verdict: Verdict) -> None:
        with self._changed:
            self.verdict = verdict
            self._changed.notify_all()
        if self._calls.ended is not None and not self._reporting and not self._left:
            self._calls.ended(verdict)


class _Refused(Exception):
    def __init__(self, reason: str, final: bool):
        super().__init__(reason)
        self.final = final


def _attempt(
    address: tuple[str, int], hello: Hello, heartbeat_seconds: float
) -> tuple[socket.socket, LineReader, list[dict[str, Any]]]:
    """Return a connection that the coordinator has accepted, and the messages that came with its answer."""
    connection = socket.create_connection(address, timeout=_ATTEMPT_SECONDS)
    try:
        if connection.getsockname() == connection.getpeername():
            raise OSError("nothing listens there")  # TCP connects a port of its own range with itself
        watch_link(connection, heartbeat_seconds)
        connection.sendall(encode("hello", **asdict(hello)))
        reader, messages = LineReader(), list[dict[str, Any]]()
        while not messages:
            received = connection.recv(2**16)
            if not received:
                raise OSError("the connection was closed at once")
            messages = reader.feed(received)
        first, *rest = messages
        if first["kind"] == "refused":
            raise _Refused(first["reason"], first["final"])
        if first["kind"] != "joined":
            raise MessageError(f"the answer is {first['kind']}, which no coordinator gives")
        connection.settimeout(ALIVE_SECONDS / 2)
    except BaseException:
        connection.close()
        raise
    return connection, reader, rest
