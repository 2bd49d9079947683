"""The transfers between the stages of a pipeline, derived from the stages' orders of actions. No torch."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megalite.topology.schedules import FORWARD, WEIGHT, Action
from megalite.topology.stages import PipelineSplit

# A stage has the receives of so many coming actions under way, besides the one that it runs: a message can then arrive
# while the stage computes, and few buffers wait empty.
RECEIVES_AHEAD = 2


class Message(NamedTuple):
    """Data that one action needs of another chunk.

    kind: F: the hidden states that enter `chunk`; B: the gradient of the hidden states that leave it.
    """

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


class Transfer(NamedTuple):
    """A message, and the stage it comes from or goes to."""

    message: Message
    stage: int


@dataclass(frozen=True)
class ScheduledAction:
    """One action of a stage with its transfers.

    starts: the receives to start before it, each sender's in the order of its sends. needs: the message that it waits
    for; None for the first chunk's forward, the last one's backward and every W. gives: the message that it makes, and
    the stage for which, maybe this one. arrived: this stage's earlier sends that have arrived once `needs` has.
    """

    action: Action
    starts: tuple[Transfer, ...]
    needs: Message | None
    gives: Transfer | None
    arrived: tuple[Message, ...]


def scheduled_actions(
    orders: Sequence[Sequence[Action]], split: PipelineSplit, stage: int
) -> tuple[ScheduledAction, ...]:
    """Return the actions of one stage with their transfers; orders: those of all stages.

    Between two stages, receives start in the order of the sends, so that a transport without tags pairs them rightly.
    """
    return tuple(_Plan(orders, split, stage).actions())


class _Plan:
    """Knows what one stage sends and receives, and when."""

    def __init__(self, orders: Sequence[Sequence[Action]], split: PipelineSplit, stage: int):
        self._order, self._split, self._stage = orders[stage], split, stage
        self._last = len(split.layers) - 1
        # Message -> the place of the action that makes it, in the order of its stage.
        self._made: dict[Message, int] = {}
        used: dict[Message, int] = {}
        # Other stage -> the messages that it sends here, in the order of its sends; those of them that are received.
        self._sent: dict[int, deque[Message]] = defaultdict(deque)
        self._started: set[Message] = set()
        # Other stage -> the messages that this one sends it, with the places at which it uses them, ascending.
        underway: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        for source, order in enumerate(orders):
            for place, action in enumerate(order):
                if (needed := self._needs(action)) is not None:
                    used[needed] = place
                if (transfer := self._gives(action)) is None:
                    continue
                self._made[transfer.message] = place
                if source != stage == transfer.stage:
                    self._sent[source].append(transfer.message)
        for action in self._order:
            transfer = self._gives(action)
            if transfer is not None and transfer.stage != stage:
                underway[transfer.stage].append((used[transfer.message], transfer.message))
        self._underway = {target: deque(sorted(messages)) for target, messages in underway.items()}

    def actions(self) -> Iterator[ScheduledAction]:
        for place, action in enumerate(self._order):
            needed = self._needs(action)
            yield ScheduledAction(
                action, tuple(self._starts(place)), needed, self._gives(action), tuple(self._arrived(needed))
            )

    def _starts(self, place: int) -> Iterator[Transfer]:
        """Yield the receives for the action at `place` and the next ones, with all that their senders send before."""
        ahead = 0
        for coming in range(place, len(self._order)):
            needed = self._needs(self._order[coming])
            if needed is None or self._source(needed) == self._stage:
                continue
            ahead += coming > place
            if ahead > RECEIVES_AHEAD:
                return
            source = self._source(needed)
            while needed not in self._started:
                message = self._sent[source].popleft()
                self._started.add(message)
                yield Transfer(message, source)

    def _arrived(self, needed: Message | None) -> Iterator[Message]:
        """Yield the messages that the sender of `needed` had used before it made `needed`."""
        if needed is None:
            return
        underway = self._underway.get(self._source(needed), deque[tuple[int, Message]]())
        while underway and underway[0][0] <= self._made[needed]:
            yield underway.popleft()[1]

    def _needs(self, action: Action) -> Message | None:
        if action.kind == WEIGHT or action.chunk == (0 if action.kind == FORWARD else self._last):
            return None
        return Message("F" if action.kind == FORWARD else "B", action.chunk, action.micro_batch)

    def _gives(self, action: Action) -> Transfer | None:
        if action.kind == WEIGHT or action.chunk == (self._last if action.kind == FORWARD else 0):
            return None
        kind: Literal["F", "B"] = "F" if action.kind == FORWARD else "B"
        chunk = action.chunk + (1 if kind == "F" else -1)
        return Transfer(Message(kind, chunk, action.micro_batch), self._split.stage_of(chunk))

    def _source(self, message: Message) -> int:
        """Return the stage that makes a message."""
        return self._split.stage_of(message.chunk + (-1 if message.kind == "F" else 1))
