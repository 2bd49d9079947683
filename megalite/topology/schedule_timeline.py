"""Check and simulation of schedules: deadlocks, the start of each action, the activations in memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from megalite.topology.schedules import SCHEDULES, Action

_DURATIONS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


@dataclass(frozen=True)
class Costs:
    """The duration of each kind of action, in any unit.

    chunks: a factor for each chunk, in model order; None: 1 for all. Two schedules do the same work only if their
        factors have the same sum.
    durations: the duration of each action instead, as it was measured; the other fields then have no part.
    """

    forward: float = 1
    backward: float = 2
    input_gradient: float = 1
    weight_gradient: float = 1
    chunks: tuple[float, ...] | None = None
    durations: Mapping[Action, float] | None = field(default=None, hash=False)

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        if self.durations is not None:
            return self.durations[action]
        duration: float = getattr(self, _DURATIONS[action.kind])
        return duration * (1 if self.chunks is None else self.chunks[action.chunk])


UNIT = Costs()


@dataclass(frozen=True)
class Timeline:
    """The start of each (stage, action), in the unit of the costs; the first action starts at 0."""

    starts: Mapping[tuple[int, Action], float]
    stages: int
    costs: Costs

    def ends(self, stage: int, action: Action) -> float:
        """Return the time at which an action ends."""
        return self.starts[stage, action] + self.costs.of(action)

    @property
    def length(self) -> float:
        """The time from the first start to the last end."""
        return max(self.ends(*placed) for placed in self.starts)

    @property
    def bubble(self) -> float:
        """The idle share of the time of all stages, from the first start to the last end."""
        busy = sum(self.costs.of(action) for _, action in self.starts)
        return max(0.0, 1 - busy / (self.stages * self.length))  # rounding alone makes it negative


def orders_of(name: str, stages: int, micro_batches: int, chunks: int) -> list[tuple[Action, ...]]:
    """Return the actions of each stage; ValueError with the reason if the schedule does not run with these numbers."""
    schedule = SCHEDULES[name]
    if reason := schedule.problem(stages, micro_batches, chunks):
        raise ValueError(reason)
    return [schedule.order(stage, stages, micro_batches, chunks) for stage in range(stages)]


def ideal_timeline(
    name: str, stages: int, micro_batches: int, chunks: int = 1, costs: Costs = UNIT
) -> Timeline:
    """Return the timeline of a schedule; ValueError if it does not run with these numbers."""
    return play(orders_of(name, stages, micro_batches, chunks), costs)


def play(orders: Sequence[Sequence[Action]], costs: Costs = UNIT) -> Timeline:
    """Simulate the stages: an action starts when its stage is free and the actions that it depends on have ended.

    Transfers take no time. Raises ValueError for a missing or repeated action, and for a deadlock, with the action at
    which each stage waits.
    """
    every = list(chain.from_iterable(orders))
    chunks = 1 + max(action.chunk for action in every)
    micro_batches = 1 + max(action.micro_batch for action in every)
    if unfinished := list(unfinished_work(orders, chunks, micro_batches)):
        raise ValueError("; ".join(unfinished))
    starts: dict[tuple[int, Action], float] = {}
    ends: dict[tuple[str, int, int], float] = {}
    free_at: list[float] = [0] * len(orders)
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                start = free_at[stage]
                try:
                    for needed in _needs(action, chunks):
                        start = max(start, ends[needed])
                except KeyError:
                    break
                starts[stage, action] = start
                kind, chunk, micro_batch = action
                end = start + costs.of(action)
                free_at[stage] = ends["I" if kind == "B" else kind, chunk, micro_batch] = end
                position[stage] += 1
                moved = True
    waiting = [
        f"stage {stage} before {order[done]}"
        for stage, (order, done) in enumerate(zip(orders, position, strict=True))
        if done < len(order)
    ]
    if waiting:
        raise ValueError(f"deadlock: {', '.join(waiting)}")
    return Timeline(starts, len(orders), costs)


def _needs(action: Action, chunks: int) -> tuple[tuple[str, int, int], ...]:
    """Return the actions that must have ended before `action` starts, with I in place of B."""
    kind, chunk, micro_batch = action
    if kind == "W":
        return (("I", chunk, micro_batch),)
    if kind == "F":
        return (("F", chunk - 1, micro_batch),) if chunk > 0 else ()
    own = ("F", chunk, micro_batch)
    return (own, ("I", chunk + 1, micro_batch)) if chunk < chunks - 1 else (own,)


def unfinished_work(orders: Sequence[Sequence[Action]], chunks: int, micro_batches: int) -> Iterator[str]:
    """Yield a message for each (chunk, micro batch) that does not run exactly once forward and once backward."""
    ran: dict[tuple[int, int], str] = {}
    for kind, chunk, micro_batch in chain.from_iterable(orders):
        ran[chunk, micro_batch] = ran.get((chunk, micro_batch), "") + kind
    for chunk, micro_batch in product(range(chunks), range(micro_batches)):
        done = "".join(sorted(ran.get((chunk, micro_batch), ""), key="FBIW".index))
        if done not in ("FB", "FIW"):
            did = done or "nothing"
            yield f"micro batch {micro_batch} in chunk {chunk} runs as {did}, which is neither FB nor FIW"


def in_flight_chunks(order: Sequence[Action]) -> int:
    """Return the peak number of activations on a stage, counted per micro batch and chunk.

    An activation lives from F to B, or to W if the backward is split.
    """
    return max(len(alive) for alive in alive_chunks(order))


def alive_chunks(order: Sequence[Action]) -> Iterator[set[tuple[int, int]]]:
    """Yield after each action the set of (chunk, micro batch) whose activations are in memory."""
    alive: set[tuple[int, int]] = set()
    for action in order:
        place = (action.chunk, action.micro_batch)
        if action.kind == "F":
            alive.add(place)
        elif action.kind in ("B", "W"):
            alive.remove(place)
        yield alive
