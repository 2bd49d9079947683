"""The service that all ranks of a job are connected to: who is here, what they agree on, who failed first.

It runs in a thread of rank 0, or in the process of `megalite launch`. It uses no torch, so that a rank can reach it
before torch is imported. A message, a new rank and a lost rank each take constant time and memory, whatever the number
of ranks: no answer to one rank lists all ranks.
"""

import hmac
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from typing import Any

from megalite.errors import listed
from megalite.launcher.control.connection import (
    ALIVE_SECONDS,
    DEFAULT_LIMITS,
    RendezvousLimits,
    alive_seconds,
    host_answers,
    require_files,
    watch_link,
    why_lost,
)
from megalite.launcher.control.coordinated_hangs import CoordinatedHangs
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.messages import (
    MOST_NAMED,
    Hello,
    MessageError,
    Verdict,
    counted_ranks,
    differences,
    encode,
    facts_from,
)
from megalite.launcher.control.rank_states import (
    CoordinatedJob,
    RankConnection,
    RankState,
    lost_report,
    ranks_here,
    silent_line,
)
from megalite.launcher.control.verdicts import report_from, verdict_of

WAITING_SECONDS = 10.0
"""The time between two lines about missing ranks."""
_HELLO_SECONDS = 10.0  # a connection that says nothing for so long is closed
_PRIMARY_SECONDS, _SECONDARY_SECONDS = 0.3, 2.0
"""The time to wait for earlier causes after a failure, and after the loss of a peer, which has another cause."""
_LATE_SECONDS = 2.0  # in which ranks that were not there yet are told the verdict
_UNSENT_BYTES = 2**24  # a rank that does not read for so long is lost
_ACCEPTED_AT_ONCE = 64
_SILENT_NAMED = 4  # of the ranks that fall silent at the same time


class Coordinator:
    """Collects the ranks of one job, compares their facts, passes values on, and decides the first cause of a failure.

    listener: a listening socket, which the coordinator closes. say: called with the lines for the user, in the thread
    that serves.
    """

    def __init__(
        self,
        listener: socket.socket,
        job: CoordinatedJob,
        limits: RendezvousLimits = DEFAULT_LIMITS,
        *,
        say: Callable[[str], None],
    ):
        self.world_size, self.ranks = job.world_size, dict[int, RankState]()
        self.verdict: Verdict | None = None
        self._listener, self._job, self._limits, self._say = listener, job, limits, say
        # Sets that keep the order: those that have not said who they are, longest first, and all.
        self._strangers = dict[RankConnection, None]()
        self._connections = dict[RankConnection, None]()
        self._left = 0
        # Name -> the distinct facts by their text, and those of each rank.
        self._facts: dict[str, tuple[dict[str, dict[str, str]], dict[int, dict[str, str]]]] = {}
        self._values: dict[str, Any] = {}
        self._asked_for_hosts: list[RankConnection] = []
        self._reports: list[FailureReport] = []
        self._reported = set[int]()
        self._hangs = CoordinatedHangs.of(limits.hangs, job.layout)
        self._look_at = self._hangs_at = 0.0
        self._decide_at: float | None = None
        self._ended = math.inf
        self._thread: threading.Thread | None = None
        self._stopped = False
        # Appending to a deque is safe in a signal handler; a queue's lock is not.
        self._calls = deque[Callable[[], None]]()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        require_files(self.world_size)

    @property
    def address(self) -> tuple[str, int]:
        """The address and port that ranks connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def complete(self) -> bool:
        """Whether every rank has come."""
        return len(self.ranks) == self.world_size

    @property
    def over(self) -> bool:
        """Whether no rank is connected any more, after all left or a verdict was told, also to late ranks."""
        if len(self._connections) > len(self._strangers):
            return False
        all_heard = self.complete or time.monotonic() - self._ended > _LATE_SECONDS
        return self.all_left or (self.verdict is not None and all_heard)

    @property
    def all_left(self) -> bool:
        """Whether every rank has come, and ended in good order."""
        return self._left == self.world_size

    @property
    def only_lost(self) -> bool:
        """Whether ranks vanished, and no rank has told a failure."""
        return bool(self._reports) and all(report.lost for report in self._reports)

    def start(self) -> None:
        """Serve in a daemon thread."""
        self._thread = threading.Thread(target=self.serve, name="coordinator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make `serve` return soon; may be called from any thread and from a signal handler."""
        self._stopped = True
        self._wake()

    def join(self, seconds: float) -> bool:
        """Wait until every rank has left or was told the verdict; False after `seconds`."""
        if self._thread is None:
            return self.over
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def serve(self) -> Verdict | None:
        """Serve until every rank has left or was told the verdict; return the verdict, None without a failure."""
        self._began = self._reminded = time.monotonic()
        self._listener.setblocking(False)
        for wake_socket in (self._wake_receiver, self._wake_sender):
            wake_socket.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        try:
            while not self.over and not self._stopped:
                for key, events in self._selector.select(self._pause()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_receiver:
                        self._wake_receiver.recv(4096)
                    elif key.data is not None:
                        self._serve_connection(key.data, events)
                while self._calls:
                    self._calls.popleft()()
                self._watch_time()
        finally:
            self._close()
        return self.verdict

    def fail(self, report: FailureReport) -> None:
        """Add the report of a failed rank, from any thread; the verdict follows soon, with the earliest cause."""
        self._call(partial(self._fail, report))

    def end(self, verdict: Verdict) -> None:
        """Tell every rank a verdict, from any thread; the first one counts."""
        self._call(partial(self._end, verdict))

    def signal(self, number: int) -> None:
        """Have every rank send itself a signal, one of PASSED_ON; from any thread, and from a signal handler."""
        self._call(partial(self._broadcast, "signal", number=int(number)))

    def _call(self, call: Callable[[], None]) -> None:
        """Have the thread that serves make a call."""
        self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b".")

    def _fail(self, report: FailureReport) -> None:
        self._reports.append(replace(report, traceback=""))  # every rank may send one
        self._reported.add(report.rank)
        delay = _SECONDARY_SECONDS if report.secondary else _PRIMARY_SECONDS
        at = time.monotonic() + delay
        self._decide_at = at if self._decide_at is None else min(self._decide_at, at)

    def _end(self, verdict: Verdict) -> None:
        if self.verdict is not None:
            return
        self.verdict, self._ended = verdict, time.monotonic()
        self._broadcast("verdict", **asdict(verdict))

    def _pause(self) -> float:
        if self.verdict is not None:
            return _LATE_SECONDS / 4
        if self._decide_at is not None:
            return max(0.0, min(1.0, self._decide_at - time.monotonic()))
        return 1.0

    def _watch_time(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._strangers), None)) and now - oldest.since > _HELLO_SECONDS:
            self._drop(oldest)
        if self.verdict is not None:
            return
        if self._decide_at is not None and now >= self._decide_at:
            self._end(verdict_of(self._reports, self.world_size))
        elif not self.complete:
            self._watch_arrivals(now)
        else:
            self._watch_hangs(now)
            if now >= self._look_at:
                self._look_at = now + self._limits.heartbeat_seconds / 10
                self._watch_silence()

    def _watch_arrivals(self, now: float) -> None:
        if now - self._began > self._limits.rendezvous_seconds:
            text = (
                f"{self.missing()} did not arrive within {self._limits.rendezvous_seconds:g} s "
                f"(launch.rendezvous_seconds); {ranks_here(self.ranks)}; look at the output of the missing ranks, "
                "and whether their hosts reach this one"
            )
            self._end(Verdict(text, 1))
        elif now - self._reminded >= WAITING_SECONDS:
            self._reminded = now
            self._say(f"waiting for {self.missing()} ({now - self._began:.0f} s); {ranks_here(self.ranks)}")

    def missing(self) -> str:
        """Return the ranks that have not come, with their hosts where these are known: "ranks 2-3 on host n1"."""
        missing = [rank for rank in range(self.world_size) if rank not in self.ranks]
        hosts = self._job.hosts
        names = list(dict.fromkeys(hosts[rank] for rank in missing)) if hosts else []
        places = f" on {'host' if len(names) == 1 else 'hosts'} {listed(names, MOST_NAMED)}" if names else ""
        return counted_ranks(missing) + places

    def _watch_hangs(self, now: float) -> None:
        if self._hangs is None or self._left or now < self._hangs_at:
            return
        self._hangs_at = now + 1.0
        if asked := set(self._hangs.to_ask(self.ranks)):
            for connection in [each for each in self._connections if each.rank in asked]:
                self._send(connection, encode("where"))
        outcome = self._hangs.outcome(self.ranks)
        if isinstance(outcome, Verdict):
            self._end(outcome)
        elif outcome is not None:
            self._say(outcome)

    def _watch_silence(self) -> None:
        """Tell the user which ranks say nothing; those of a large job speak less often."""
        now = time.time()
        longest = self._limits.heartbeat_seconds + alive_seconds(self.world_size) - ALIVE_SECONDS
        silent = {
            rank: state
            for rank, state in self.ranks.items()
            if now - state.heard > longest and not state.left and not state.silent
        }
        named = 0
        for connection in list(self._connections) if silent else ():
            state = silent.get(connection.rank)
            if state is None:
                continue
            answers = host_answers(connection.socket, self._limits.heartbeat_seconds)
            if answers is False:
                continue  # the kernel ends the connection soon, and the rank is lost
            state.silent, named = True, named + 1
            if named <= _SILENT_NAMED:
                self._say(silent_line(connection.rank, state, self._job.layout, answers))
        if named > _SILENT_NAMED:
            self._say(f"{named - _SILENT_NAMED} more ranks have been silent for as long")

    def _accept(self) -> None:
        with suppress(OSError):  # nobody waits any more
            for _ in range(_ACCEPTED_AT_ONCE):
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                watch_link(accepted, self._limits.heartbeat_seconds)
                connection = RankConnection(accepted, time.monotonic())
                self._connections[connection] = self._strangers[connection] = None
                self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve_connection(self, connection: RankConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not events & selectors.EVENT_READ or connection not in self._connections:
            return
        try:
            received = connection.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, why_lost(error))
            return
        if not received:
            self._lose(connection, why_lost())
            return
        try:
            for message in connection.reader.feed(received):
                self._take(connection, message)
                if connection not in self._connections:
                    return
        except MessageError as error:
            self._lose(connection, f"it sent something that no rank sends: {error}")

    def _take(self, connection: RankConnection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if connection.rank < 0:
            if kind != "hello":
                raise MessageError("the first message is not hello")
            self._welcome(connection, message)
            return
        state = self.ranks.get(connection.rank)
        if state is None:
            return  # it came after the verdict
        state.heard, state.silent = time.time(), False
        if kind == "alive":
            state.step, state.activity = message["step"], message["activity"]
            self._send(connection, encode("heard"))
            if self._hangs is not None:
                self._hangs.see(connection.rank, message["marks"])
        elif kind == "stack" and self._hangs is not None:
            self._hangs.answered(connection.rank, message["text"])
        elif kind == "facts":
            self._compare(connection.rank, message)
        elif kind == "announce":
            self._publish(message["name"], message["value"])
        elif kind == "hosts":
            self._asked_for_hosts.append(connection)
            self._answer_hosts()
        elif kind == "failed":
            self._fail(report_from(message))
        elif kind == "stop":
            self._end(Verdict(message["text"], message["exit_code"], connection.rank, state.host))
        elif kind == "leave":
            self._left += not state.left
            state.left, state.exit_code = True, message["exit_code"]
        else:
            raise MessageError(f"{kind} is not a message of a rank")

    def _welcome(self, connection: RankConnection, message: dict[str, Any]) -> None:
        hello = Hello(**{name: message[name] for name in Hello.__dataclass_fields__})
        refusal, final = self._refusal(hello)
        if refusal:
            self._send(connection, encode("refused", reason=refusal, final=final))
            connection.closing = True
            self._flush(connection)
            return
        connection.rank = hello.rank
        del self._strangers[connection]
        if self.verdict is not None:
            self._send(connection, encode("joined", address=connection.socket.getsockname()[0]))
            self._send(connection, encode("verdict", **asdict(self.verdict)))
            return
        self.ranks[hello.rank] = RankState(hello.host, hello.pid, time.time())
        self._send(connection, encode("joined", address=connection.socket.getsockname()[0]))
        for name, value in self._values.items():
            self._send(connection, encode("value", name=name, value=value))
        self._answer_hosts()

    def _answer_hosts(self) -> None:
        """Once all ranks are here, send the hosts, each with its successive ranks, to the ranks that asked for them."""
        if not self.complete or not self._asked_for_hosts:
            return
        names = (self.ranks[rank].host for rank in range(self.world_size))
        line = encode(
            "value", name="hosts", value=[[name, len(list(ranks))] for name, ranks in groupby(names)]
        )
        while self._asked_for_hosts:
            self._send(self._asked_for_hosts.pop(), line)

    def _refusal(self, hello: Hello) -> tuple[str, bool]:
        """Return why a rank is refused, or "", and whether another attempt of the same process is in vain."""
        same_nonce = hmac.compare_digest(hello.nonce.encode(), self._job.nonce.encode())
        if not same_nonce or hello.job != self._job.name:
            return "another job is at work there", False
        if hello.world_size != self.world_size:
            return f"the job there has {self.world_size} ranks, this one has {hello.world_size}", False
        if not 0 <= hello.rank < self.world_size:
            return f"rank {hello.rank} is not a rank of a job with {self.world_size} ranks", True
        if (first := self.ranks.get(hello.rank)) is None:
            return "", False
        if self.complete:
            return "all ranks of the job there are present", False
        text = (
            f"rank {hello.rank} was started twice: pid {first.pid} on {first.host} and pid {hello.pid} on "
            f"{hello.host}; each process needs a rank of its own (RANK), and each job a port of its own (MASTER_PORT)"
        )
        self._say(text)
        return text, True

    def _compare(self, rank: int, message: dict[str, Any]) -> None:
        """Note the facts of a rank; once all ranks have told theirs, pass on that they agree, or end the job."""
        name = message["name"]
        groups, told = self._facts.setdefault(name, ({}, {}))
        text = message["facts"]
        if text not in groups:
            groups[text] = facts_from(text)
        told[rank] = groups[text]
        if len(told) < self.world_size:
            return
        lines = differences(told, {rank: state.host for rank, state in self.ranks.items()})
        if lines:
            self._end(Verdict("\n  ".join([message["about"], *lines]), 2))
        else:
            self._publish(name, None)

    def _publish(self, name: str, value: Any) -> None:
        """Give a value to the ranks that are here, and to those that come later."""
        self._values[name] = value
        self._broadcast("value", name=name, value=value)

    def _lose(self, connection: RankConnection, reason: str) -> None:
        """Close a connection; a rank that has not left is lost."""
        self._drop(connection)
        state = self.ranks.get(connection.rank)
        over = self.verdict is not None or connection.rank in self._reported
        if state is None or state.left or over:
            return
        self._fail(lost_report(connection.rank, state, self._job, reason))

    def _broadcast(self, kind: str, **fields: Any) -> None:
        line = encode(kind, **fields)
        # Rank 0 last: its process may hold this thread and ends when it knows.
        for connection in sorted(self._connections, key=lambda connection: -connection.rank):
            if connection.rank >= 0:
                self._send(connection, line)

    def _send(self, connection: RankConnection, line: bytes) -> None:
        if connection in self._connections:
            connection.unsent += line
            self._flush(connection)

    def _flush(self, connection: RankConnection) -> None:
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                connection.unsent = connection.unsent[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(connection, why_lost(error))
            return
        if len(connection.unsent) > _UNSENT_BYTES:
            self._lose(connection, "it does not read what it is sent: stopped, or busy outside of Python")
        elif connection.closing and not connection.unsent:
            self._drop(connection)
        elif connection.writing != bool(connection.unsent):
            connection.writing = bool(connection.unsent)
            writing = selectors.EVENT_WRITE if connection.writing else 0
            self._selector.modify(connection.socket, selectors.EVENT_READ | writing, connection)

    def _drop(self, connection: RankConnection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._strangers.pop(connection, None)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        for each_socket in (self._listener, self._wake_receiver, self._wake_sender):
            each_socket.close()
