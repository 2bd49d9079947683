"""Orders of actions, checked and played through: whether they end, when each action starts, what stays in memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megalite.topology.schedules import SCHEDULES, Action
from megalite.topology.stages import PipelineSplit


@dataclass(frozen=True)
class Costs:
    """How long each kind of action takes, in any unit; `chunks` has a factor for each chunk, in model order.

    Every chunk costs 1 without them: for two schedules to do the same work, the factors must have the same sum.
    """

    forward: float = 1
    backward: float = 2
    input_gradient: float = 1
    weight_gradient: float = 1
    chunks: tuple[float, ...] | None = None

    def of(self, action: Action) -> float:
        kinds = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }
        return kinds[action.kind] * (1 if self.chunks is None else self.chunks[action.chunk])


UNIT = Costs()


@dataclass(frozen=True)
class Timeline:
    """When each action of each stage starts, in the unit of the costs, counted from the first."""

    starts: Mapping[tuple[int, Action], float]
    stages: int
    costs: Costs

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(start + self.costs.of(action) for (_, action), start in self.starts.items())

    @property
    def bubble(self) -> float:
        """The share of the stages' time, from the first start to the last end, in which they do nothing."""
        busy = sum(self.costs.of(action) for _, action in self.starts)
        return 1 - busy / (self.stages * self.length)


def orders_of(name: str, stages: int, micro_batches: int, chunks: int) -> list[tuple[Action, ...]]:
    """What each stage does. Raises ValueError with the reason where the schedule does not run so."""
    schedule = SCHEDULES[name]
    if reason := schedule.problem(stages, micro_batches, chunks):
        raise ValueError(reason)
    return [schedule.order(stage, stages, micro_batches, chunks) for stage in range(stages)]


def ideal_timeline(
    name: str, stages: int, micro_batches: int, chunks: int = 1, costs: Costs = UNIT
) -> Timeline:
    """The schedule as `play` plays it. Raises ValueError where it does not run so."""
    return play(orders_of(name, stages, micro_batches, chunks), costs)


def bubble_fraction(
    name: str, stages: int, micro_batches: int, chunks: int = 1, costs: Costs = UNIT
) -> float:
    """The idle share of the schedule's ideal timeline."""
    return ideal_timeline(name, stages, micro_batches, chunks, costs).bubble


def play(orders: Sequence[Sequence[Action]], costs: Costs = UNIT) -> Timeline:
    """Each stage works through its order; an action starts when its stage is free and what it needs has ended.

    Transfers are free. Raises ValueError where something is missing or done twice, and where stages wait for
    each other for ever, naming what each of them stands at.
    """
    every = [action for order in orders for action in order]
    chunks = 1 + max(action.chunk for action in every)
    micro_batches = 1 + max(action.micro_batch for action in every)
    if unfinished := list(_unfinished(orders, chunks, micro_batches)):
        raise ValueError("; ".join(unfinished))
    starts: dict[tuple[int, Action], float] = {}
    ends: dict[Action, float] = {}
    free_at: list[float] = [0] * len(orders)
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                needed = list(_needs(action, chunks))
                if any(each not in ends for each in needed):
                    break
                start = max([free_at[stage], *(ends[each] for each in needed)])
                starts[stage, action] = start
                free_at[stage] = ends[_as_needed(action)] = start + costs.of(action)
                position[stage] += 1
                moved = True
    standing = [
        f"stage {stage} before {order[done]}"
        for stage, (order, done) in enumerate(zip(orders, position, strict=True))
        if done < len(order)
    ]
    if standing:
        raise ValueError(f"deadlock: {', '.join(standing)}")
    return Timeline(starts, len(orders), costs)


def _needs(action: Action, chunks: int) -> Iterator[Action]:
    """What must have ended before the action starts; I stands for B, too."""
    kind, chunk, micro_batch = action
    if kind == "W":
        yield Action("I", chunk, micro_batch)
    elif kind == "F":
        if chunk > 0:
            yield Action("F", chunk - 1, micro_batch)
    else:
        yield Action("F", chunk, micro_batch)
        if chunk < chunks - 1:
            yield Action("I", chunk + 1, micro_batch)


def _as_needed(action: Action) -> Action:
    return action._replace(kind="I") if action.kind == "B" else action


def check_order(orders: Sequence[Sequence[Action]], split: PipelineSplit, micro_batches: int) -> list[str]:
    """What is wrong with the stages' orders.

    Nothing, where every chunk of the split runs on its own stage, once forward and once backward (B, or I and W)
    for every micro batch, and no stage waits for ever.
    """
    wrong = [
        f"stage {stage} does {action}, which is not its own"
        for stage, order in enumerate(orders)
        for action in order
        if action.chunk not in split.chunks_of(stage) or action.micro_batch >= micro_batches
    ]
    wrong += _unfinished(orders, len(split.layers), micro_batches)
    if not wrong:
        try:
            play(orders)
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def _unfinished(orders: Sequence[Sequence[Action]], chunks: int, micro_batches: int) -> Iterator[str]:
    """What does not run once forward and once backward."""
    times = Counter(action for order in orders for action in order)
    for chunk, micro_batch in product(range(chunks), range(micro_batches)):
        done = "".join(kind * times[Action(kind, chunk, micro_batch)] for kind in ("F", "B", "I", "W"))
        if done not in ("FB", "FIW"):
            did = done or "nothing"
            yield f"micro batch {micro_batch} in chunk {chunk} runs as {did}, which is neither FB nor FIW"


def in_flight_chunks(order: Sequence[Action]) -> int:
    """The most activations that a stage holds at once, each of one micro batch in one chunk.

    They live from F to B, or to W where the backward is split.
    """
    return max(len(alive) for alive in _alive(order))


def in_flight_peak(order: Sequence[Action]) -> int:
    """The most micro batches of which a stage holds any activation at once."""
    return max(len({micro_batch for _, micro_batch in alive}) for alive in _alive(order))


def _alive(order: Sequence[Action]) -> Iterator[set[tuple[int, int]]]:
    """The (chunk, micro batch) whose activations are held, after each action."""
    alive: set[tuple[int, int]] = set()
    for action in order:
        place = (action.chunk, action.micro_batch)
        if action.kind == "F":
            alive.add(place)
        elif action.kind in ("B", "W"):
            alive.remove(place)
        yield alive
