"""A model of a GPU's hardware queues, which several streams share: whether ranks that send each other messages hang.

A queue takes its commands in their order. One whose stream still sends or receives, or that waits for an event not yet
reached, keeps all behind it waiting, also those of other streams (NCCL's send and receive are kernels, which end
together). The host never waits, so the order of its commands and the queues decide alone.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megalite.topology.transfers import Message, StageProgram, Transfer

COMPUTES = "computes"


class Command(NamedTuple):
    """One command of a stream. of: what is computed, the (source, target) of a message, or the event."""

    stream: Hashable
    kind: Literal["compute", "send", "receive", "record", "wait"]
    of: Hashable


# (rank, stream) -> the queue of that rank that takes the stream's commands.
Queues = Callable[[int, Hashable], Hashable]


def own_queues(rank: int, stream: Hashable) -> Hashable:
    return stream


def one_queue(rank: int, stream: Hashable) -> Hashable:
    """CUDA_DEVICE_MAX_CONNECTIONS=1."""
    return 0


class Issued:
    """The commands that a host issues for computing and for sends and receives without a batch, as torch on NCCL.

    Such a message runs on the stream of its pair's communicator, after what the computing stream has been given.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def compute(self, what: Hashable) -> None:
        self.commands.append(Command(COMPUTES, "compute", what))

    def start(self, kind: Literal["send", "receive"], source: int, target: int, stream: Hashable) -> int:
        """Start a message; return the event of its end."""
        ready, end = len(self.commands), len(self.commands) + 1
        self.commands += [
            Command(COMPUTES, "record", ready),
            Command(stream, "wait", ready),
            Command(stream, kind, (source, target)),
            Command(stream, "record", end),
        ]
        return end

    def wait(self, end: int) -> None:
        """The computing stream waits for the end of a message."""
        self.commands.append(Command(COMPUTES, "wait", end))


def stream_between(source: int, target: int) -> Hashable:
    """Each pair of stages has a communicator for each direction."""
    return "down" if source < target else "up", min(source, target), max(source, target)


def commands_of(program: StageProgram, stage: int) -> list[Command]:
    """Return what the host of a stage issues in a step of its program."""
    issued = Issued()
    coming: dict[Message, int] = {}
    going: dict[Message, int] = {}
    for step in program:
        if isinstance(step, Transfer):
            ends = coming if step.target == stage else going
            kind: Literal["send", "receive"] = "receive" if step.target == stage else "send"
            stream = stream_between(step.source, step.target)
            ends[step.message] = issued.start(kind, step.source, step.target, stream)
            continue
        if step.needs in coming:
            issued.wait(coming.pop(step.needs))
            for message in step.arrived:
                issued.wait(going.pop(message))
        issued.compute(step.action)
    for end in going.values():
        issued.wait(end)
    return issued.commands


@dataclass
class _Rank:
    queues: Mapping[Hashable, deque[Command]]
    reached: set[Hashable] = field(default_factory=set)
    # A stream that sends or receives -> the events recorded behind.
    busy: dict[Hashable, list[Hashable]] = field(default_factory=dict)


def hung(
    commands: Sequence[Sequence[Command]], queue_of: Queues, *, one_by_one: bool = False
) -> dict[int, list[Command]]:
    """Return the commands at which each rank's queues stand; empty if all commands run.

    one_by_one: a rank begins a command only once the one before has ended, which is stricter than any sharing.
    """
    ranks = []
    for rank, issued in enumerate(commands):
        queues: dict[Hashable, deque[Command]] = defaultdict(deque)
        for command in issued:
            queues[queue_of(rank, command.stream)].append(command)
        ranks.append(_Rank(queues))
    # (source, target) -> the end of the message that has begun: its rank and stream.
    begun: dict[Hashable, tuple[_Rank, Hashable]] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for queue in rank.queues.values():
                while queue and _takes(rank, queue[0], one_by_one):
                    _begin(rank, queue.popleft(), begun)
                    moved = True
    standing = {at: [queue[0] for queue in rank.queues.values() if queue] for at, rank in enumerate(ranks)}
    return {at: heads for at, heads in standing.items() if heads}


def _takes(rank: _Rank, command: Command, one_by_one: bool) -> bool:
    if one_by_one and rank.busy:
        return False
    if command.stream in rank.busy:
        # The kernel before an event reaches it when it ends.
        return command.kind == "record"
    return command.kind != "wait" or command.of in rank.reached


def _begin(rank: _Rank, command: Command, begun: dict[Hashable, tuple[_Rank, Hashable]]) -> None:
    if command.kind == "record":
        if command.stream in rank.busy:
            rank.busy[command.stream].append(command.of)
        else:
            rank.reached.add(command.of)
    elif command.kind in ("send", "receive"):
        rank.busy[command.stream] = []
        other = begun.pop(command.of, None)
        if other is None:
            begun[command.of] = rank, command.stream
            return
        for end, stream in ((rank, command.stream), other):
            end.reached.update(end.busy.pop(stream))
