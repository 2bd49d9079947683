"""The transfers between the stages of a pipeline, derived from the stages' orders of actions. No torch.

All stages issue their actions and both ends of each transfer in one order: by the time at which each of them happens
when the schedule runs in unit costs. The earliest that has not ended can thus always run, even on a device that runs
one command after another: however CUDA's streams share its hardware queues, no stages wait for each other in a circle.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megalite.topology.schedule_timeline import play
from megalite.topology.schedules import FORWARD, WEIGHT, Action
from megalite.topology.stages import PipelineSplit

# A message that is ready early travels so many actions before the receiver needs it: few buffers wait there.
ACTIONS_AHEAD = 2


class Message(NamedTuple):
    """Data that one action needs of another chunk.

    kind: F: the hidden states that enter `chunk`; B: the gradient of the hidden states that leave it.
    """

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int

    @property
    def made_in(self) -> int:
        """The chunk whose action makes the message."""
        return self.chunk + (-1 if self.kind == "F" else 1)


class Transfer(NamedTuple):
    """A message, the stage that starts to send it here, and the one that starts to receive it here."""

    message: Message
    source: int
    target: int


@dataclass(frozen=True)
class ScheduledAction:
    """One action of a stage with its messages.

    needs: the message that it waits for; None for the first chunk's forward, the last one's backward and every W.
    gives: the message that it makes, maybe for this stage. arrived: this stage's earlier messages that have arrived
    once `needs` has.
    """

    action: Action
    needs: Message | None
    gives: Message | None
    arrived: tuple[Message, ...]


# The actions and transfers of a stage in a step, in the order in which it issues them.
StageProgram = tuple[ScheduledAction | Transfer, ...]


class _Maker(NamedTuple):
    """The stage that makes a message, the place of the action in the stage's order, and the action's end."""

    stage: int
    place: int
    end: float


def stage_programs(orders: Sequence[Sequence[Action]], split: PipelineSplit) -> list[StageProgram]:
    """Return the program of every stage, from the orders of their actions.

    Between two stages, receives start in the order of the sends, so that a transport without tags pairs them rightly.
    """
    timeline, last = play(orders), len(split.layers) - 1
    makers: dict[Message, _Maker] = {}
    # (source, target) -> the messages with the places at which the target uses them, ascending.
    underway: dict[tuple[int, int], deque[tuple[int, Message]]] = defaultdict(deque)
    for stage, order in enumerate(orders):
        for place, action in enumerate(order):
            if (given := _gives(action, last)) is not None:
                end = timeline.starts[stage, action] + timeline.costs.of(action)
                makers[given] = _Maker(stage, place, end)
            if (needed := _needs(action, last)) is not None:
                underway[split.stage_of(needed.made_in), stage].append((place, needed))
    # Each stage's steps with their places in the one order.
    steps: list[list[tuple[tuple[float, ...], ScheduledAction | Transfer]]] = [[] for _ in orders]
    for stage, order in enumerate(orders):
        begins = [timeline.starts[stage, action] for action in order]
        for place, action in enumerate(order):
            needed, arrived = _needs(action, last), []
            if needed is not None and (maker := makers[needed]).stage != stage:
                time = max(maker.end, begins[max(0, place - ACTIONS_AHEAD)])
                transfer = Transfer(needed, maker.stage, stage)
                for end in (maker.stage, stage):
                    # Before an action that starts at the same time, which may need the message.
                    steps[end].append(((time, 0, maker.stage, maker.place), transfer))
                going = underway[stage, maker.stage]
                while going and going[0][0] <= maker.place:
                    arrived.append(going.popleft()[1])
            scheduled = ScheduledAction(action, needed, _gives(action, last), tuple(arrived))
            steps[stage].append(((begins[place], 1, stage, place), scheduled))
    return [tuple(step for _, step in sorted(each, key=lambda placed: placed[0])) for each in steps]


def _needs(action: Action, last: int) -> Message | None:
    """Return the message that an action waits for. last: the last chunk."""
    if action.kind == WEIGHT or action.chunk == (0 if action.kind == FORWARD else last):
        return None
    return Message("F" if action.kind == FORWARD else "B", action.chunk, action.micro_batch)


def _gives(action: Action, last: int) -> Message | None:
    """Return the message that an action makes."""
    if action.kind == WEIGHT or action.chunk == (last if action.kind == FORWARD else 0):
        return None
    if action.kind == FORWARD:
        return Message("F", action.chunk + 1, action.micro_batch)
    return Message("B", action.chunk - 1, action.micro_batch)
