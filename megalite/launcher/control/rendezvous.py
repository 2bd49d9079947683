"""How a rank that a launcher started finds the coordinator of its job, or runs it: rank 0 does, in a thread.

Under `megalite launch` the launching process is the coordinator. Under torchrun, whose agent owns MASTER_PORT, rank 0
takes a free port and tells it through the agent's store. Elsewhere rank 0 listens at MASTER_ADDR:MASTER_PORT.
"""

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from megalite.errors import LaunchError
from megalite.launcher.control.connection import RendezvousLimits, owner_of_port
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.member import Find, Member, RankCalls
from megalite.launcher.control.messages import Hello, Verdict
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.launcher.process import arguments_of
from megalite.launcher.rank.address import Route, route_to_master
from megalite.launcher.rank.detect import LOOPBACK, RankInfo
from megalite.launcher.rank.environment import agent_owns_port, coordinator_address, variables
from megalite.launcher.rank.host_of_rank import hosts_of_ranks
from megalite.topology.axes import Layout

_KEY = "megalite/coordinator"  # of the agent's store
_PORT_SECONDS = 5.0  # an earlier job may be about to end
_TOLD_SECONDS = 3.0  # for the others to take the verdict before the process of the coordinator ends
_LEFT_SECONDS = 30.0
_FIRST_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


class AgentStore(Protocol):
    """The store of torchrun's agents: texts that all ranks see, also those of earlier attempts."""

    def put(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str:
        """Return the text; OSError if there is none, or the agent does not answer."""


@dataclass
class Meeting:
    """A rank's place among the others. coordinator: in the process of rank 0, unless `megalite launch` runs it.

    address: of this host, as the others reach it. meets_at: where the coordinator listens, for people.
    """

    member: Member
    coordinator: Coordinator | None
    address: str
    meets_at: str

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, known once all ranks have come."""
        return self.member.hosts()

    def fail(self, report: FailureReport) -> Verdict | None:
        """Send the failure of this rank, and return the verdict on the job; None if none comes in time."""
        return self.member.fail(report)

    def stop(self, text: str, exit_code: int) -> Verdict | None:
        """End the job on all ranks in good order, for a reason that is no failure."""
        verdict = self.member.stop(text, exit_code)
        self.pass_on()
        return verdict

    def leave(self, exit_code: int = 0) -> Verdict | None:
        """Leave the job. With the coordinator, wait for the others to leave, and return the verdict if one fails."""
        self.member.leave(exit_code)
        if self.coordinator is None:
            return None
        self.coordinator.join(_LEFT_SECONDS)
        self.coordinator.stop()
        return self.coordinator.verdict

    def pass_on(self) -> None:
        """Give the others, for a moment, the time to take the verdict, before the process of the coordinator ends."""
        if self.coordinator is not None:
            self.member.leave()
            self.coordinator.join(_TOLD_SECONDS)


def meet(
    info: RankInfo,
    limits: RendezvousLimits,
    calls: RankCalls,
    *,
    agent_store: Callable[[RankInfo], AgentStore],
    layout: Layout | None = None,
    interface: str = "auto",
) -> Meeting:
    """Join the job of this rank, whoever started it.

    layout: None if the configuration could not be read. agent_store: opens the store of torchrun's agents. Raises
    LaunchError, also for a port in use or a MASTER_ADDR of another host.
    """
    exported = coordinator_address()
    route = None if info.on_one_node else route_to_master(info, variables(), interface)
    own = LOOPBACK if route is None else route.address
    if route is not None and route.note and info.rank == 0:
        calls.say(f"note: {route.note}")
    if exported is not None:
        place = _Place(lambda: exported, None, exported[2], "")
    elif agent_owns_port():
        place = _beside_agent(info, own, agent_store(info))
    else:
        place = _at_master(info, route)
    coordinator = None
    if place.listener is not None:
        hosts = hosts_of_ranks(info, variables(), arguments_of(os.getppid()))
        job = CoordinatedJob(info.world_size, place.job, place.nonce, layout, hosts)
        coordinator = Coordinator(place.listener, job, limits, say=calls.say)
        coordinator.start()
    made: list[Meeting] = []

    def verdict_came(verdict: Verdict) -> None:
        assert calls.ended is not None
        while not made:  # the verdict may come before `join` has returned
            time.sleep(_PAUSE_SECONDS)
        calls.ended(verdict)

    member = Member.join(
        place.find,
        Hello(info.rank, info.world_size, info.node, os.getpid(), place.job),
        # The coordinator has the same limit, and names the ranks that are missing: it speaks first.
        replace(limits, rendezvous_seconds=limits.rendezvous_seconds + _FIRST_SECONDS),
        RankCalls(
            calls.say if info.local_rank == 0 else lambda _: None,
            calls.progress,
            None if calls.ended is None else verdict_came,
        ),
    )
    host = member.coordinator_address
    meets_at = f"[{host}]" if ":" in host else host
    made.append(Meeting(member, coordinator, own, f"{meets_at}:{member.coordinator_port}"))
    return made[0]


@dataclass(frozen=True)
class _Place:
    """Where a rank finds the coordinator. listener: of the coordinator, in the process that is to run it."""

    find: Find
    listener: socket.socket | None
    nonce: str
    job: str


def _beside_agent(info: RankInfo, own: str, store: AgentStore) -> _Place:
    """Return the place under torchrun: rank 0 tells its address and a nonce through the agent's store.

    The store keeps the text of an attempt that failed. Its coordinator is gone, or refuses the nonce, until rank 0 of
    this attempt has written its own.
    """
    if info.rank > 0:
        return _Place(lambda: _parsed(store.get(_KEY)), None, "", info.job)
    listener, nonce = _listen(own, 0, info), secrets.token_hex(16)
    port: int = listener.getsockname()[1]
    store.put(_KEY, f"{own} {port} {nonce}")
    return _Place(lambda: (own, port, nonce), listener, nonce, info.job)


def _parsed(text: str) -> tuple[str, int, str]:
    address, port, nonce = text.split()
    return address, int(port), nonce


def _at_master(info: RankInfo, route: Route | None) -> _Place:
    """Return the place elsewhere: MASTER_ADDR:MASTER_PORT, where rank 0 listens. route: None on a single host."""
    master, port = LOOPBACK if route is None else route.master, info.master_port
    listener = None
    if info.rank == 0:
        if route is not None and not route.serves:
            raise LaunchError(
                f"MASTER_ADDR = {info.master_addr} ({master}) is no address of {info.node}, where rank 0 runs; set "
                f"MASTER_ADDR to {route.address} on every host, or start rank 0 on the host of that address"
            )
        listener = _listen(master, port, info)
    return _Place(lambda: (master, port, ""), listener, "", info.job)


def _other_port(info: RankInfo) -> str:
    if info.launcher == "deepspeed":  # it sets MASTER_PORT itself
        return "give deepspeed a free port with --master_port"
    return "set MASTER_PORT to a free port on every host"


def _listen(address: str, port: int, info: RankInfo) -> socket.socket:
    """Return a socket that listens there. Raises LaunchError, for a port in use after some seconds."""
    deadline = time.monotonic() + _PORT_SECONDS
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=max(128, info.world_size))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
                continue
            if error.errno == errno.EADDRINUSE:
                owner = owner_of_port(port) or "another process"
                text = f"port {port} on {info.node} is in use by {owner}; {_other_port(info)}"
            else:
                text = (
                    f"rank 0 cannot listen at {address}:{port} on {info.node} ({error.strerror}); set MASTER_ADDR to "
                    "an address of that host, and MASTER_PORT to a port from 1024 to 65535"
                )
            raise LaunchError(text) from error
