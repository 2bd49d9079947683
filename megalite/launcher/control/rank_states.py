"""The ranks of a job as its coordinator knows them, and the lines that say who is here and who is silent."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megalite.errors import listed
from megalite.launcher.control.failures import FailureReport
from megalite.launcher.control.messages import MOST_NAMED, LineReader, counted_ranks
from megalite.topology.axes import Layout

_RECENT_SECONDS = 5.0  # the report of a lost rank that was heard of less lately says so


@dataclass
class RankState:
    """The last news of a rank.

    heard: the time of its last message (time.time()). left, exit_code: it ended in good order. silent: the user was
    told that it says nothing.
    """

    host: str
    pid: int
    heard: float
    step: int | None = None
    activity: str = ""
    left: bool = False
    exit_code: int | None = None
    silent: bool = False


@dataclass(frozen=True)
class CoordinatedJob:
    """The job whose ranks meet at a coordinator.

    name, nonce: a rank with others is refused. layout: None: unknown, so ranks are named by their numbers. hosts: the
    host on which each rank is to run, if known.
    """

    world_size: int
    name: str = ""
    nonce: str = ""
    layout: Layout | None = None
    hosts: Sequence[str] = ()


@dataclass(eq=False)
class RankConnection:
    socket: socket.socket
    since: float
    reader: LineReader = field(default_factory=LineReader)
    unsent: bytes = b""
    rank: int = -1
    closing: bool = False
    writing: bool = False


def ranks_here(states: Mapping[int, RankState]) -> str:
    """Return which ranks have come, by host."""
    ranks_of: dict[str, list[int]] = {}
    for rank, state in states.items():
        ranks_of.setdefault(state.host, []).append(rank)
    here = listed(
        [f"{counted_ranks(ranks)} on {host}" for host, ranks in sorted(ranks_of.items())], MOST_NAMED
    )
    return f"here: {here}" if here else "no rank is here yet"


def unheard_of(states: Mapping[int, RankState], seconds: float) -> list[int]:
    """Return the ranks from which no message has come for so long."""
    now = time.time()
    return [rank for rank, state in states.items() if now - state.heard > seconds]


def silent_line(rank: int, state: RankState, layout: Layout | None, answers: bool | None) -> str:
    """Return the line about a silent rank. answers: whether its host does; None if that is unknown."""
    checked = ", though its host answers" if answers else ""
    name = layout.describe(rank) if layout is not None else f"rank {rank}"
    return (
        f"{name} on {state.host} has been silent for {time.time() - state.heard:.0f} s{checked}: the process is "
        f"stopped, or busy outside of Python{'' if answers else ', or its host is gone'}"
    )


def lost_report(rank: int, state: RankState, job: CoordinatedJob, reason: str) -> FailureReport:
    """Return the report of a rank whose connection ended."""
    now, layout = time.time(), job.layout
    silence = f", last heard {now - state.heard:.0f} s ago" if now - state.heard >= _RECENT_SECONDS else ""
    return FailureReport(
        rank=rank,
        coordinates=layout.named_places(rank) if layout is not None else {},
        node=state.host,
        pid=state.pid,
        job=job.name,
        time=now,
        exception="",
        message=f"vanished (pid {state.pid}{silence}): {reason}",
        lost=True,
        step=state.step,
        activity=state.activity,
    )
