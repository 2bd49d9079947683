"""A model of a GPU's hardware queues, which several streams share: whether ranks that send each other messages hang.

A queue takes its commands in their order. One whose stream still sends or receives, or that waits for an event not yet
reached, keeps all behind it waiting, also those of other streams (NCCL's send and receive are kernels, which end
together, as those of a collective do). The host never waits, so the order of its commands and the queues decide alone.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megalite.topology.transfers import Message, ScheduledAction, StageProgram, Transfer

COMPUTES = "computes"


class Meeting(NamedTuple):
    """A message or a collective, which ends for all its ranks together; a message's ranks are source and target."""

    name: str
    ranks: tuple[int, ...]


class Command(NamedTuple):
    """One command of a stream. of: what is computed, the Meeting, or the event."""

    stream: Hashable
    kind: Literal["compute", "meet", "record", "wait"]
    of: Hashable


# (rank, stream) -> the queue of that rank that takes the stream's commands.
Queues = Callable[[int, Hashable], Hashable]


def own_queues(rank: int, stream: Hashable) -> Hashable:
    return stream


def one_queue(rank: int, stream: Hashable) -> Hashable:
    """CUDA_DEVICE_MAX_CONNECTIONS=1."""
    return 0


class Issued:
    """The commands that a host issues for computing, collectives, and messages without a batch, as torch on NCCL.

    Each runs on the stream of its communicator, after what the computing stream has been given; a message's is that of
    a pair of ranks.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def compute(self, what: Hashable) -> None:
        self.commands.append(Command(COMPUTES, "compute", what))

    def start(self, meeting: Meeting, stream: Hashable) -> int:
        """Start a message or a collective; return the event of its end."""
        ready, end = len(self.commands), len(self.commands) + 1
        self.commands += [
            Command(COMPUTES, "record", ready),
            Command(stream, "wait", ready),
            Command(stream, "meet", meeting),
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
            stream = stream_between(step.source, step.target)
            ends[step.message] = issued.start(Meeting("message", (step.source, step.target)), stream)
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
    # The ranks that are there, each with the stream that waits for the others.
    begun: dict[Meeting, list[tuple[_Rank, Hashable]]] = defaultdict(list)
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


def _begin(rank: _Rank, command: Command, begun: dict[Meeting, list[tuple[_Rank, Hashable]]]) -> None:
    if command.kind == "record":
        if command.stream in rank.busy:
            rank.busy[command.stream].append(command.of)
        else:
            rank.reached.add(command.of)
    elif isinstance(command.of, Meeting):
        rank.busy[command.stream] = []
        here = begun[command.of]
        here.append((rank, command.stream))
        if len(here) == len(command.of.ranks):
            for each, stream in begun.pop(command.of):
                each.reached.update(each.busy.pop(stream))


def posted_ahead(program: StageProgram, stage: int, ahead: int) -> StageProgram:
    """Return the program with `ahead` receives posted besides the next one, and each message sent once it is made."""
    plan = [step for step in program if isinstance(step, ScheduledAction)]
    places = {each.needs: place for place, each in enumerate(plan)}
    receives = [step for step in program if isinstance(step, Transfer) and step.target == stage]
    sends = {step.message: step for step in program if isinstance(step, Transfer) and step.source == stage}
    posts = defaultdict(list)
    for at, receive in enumerate(receives):
        posts[places[receives[at - ahead].message] if at >= ahead else 0].append(receive)
    steps: list[ScheduledAction | Transfer] = []
    for place, each in enumerate(plan):
        steps += [*posts[place], each]
        steps += [sends[each.gives]] if each.gives in sends else []
    return tuple(steps)
