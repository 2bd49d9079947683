"""Simulation of a pipeline whose stages share the cores of a machine: the more of them compute, the slower is each."""

from collections.abc import Callable, Iterator, Sequence
from math import inf

from megalite.topology.schedules import Action

_LEAST = 1e-12
"""Seconds below which an action has ended: rounding leaves as much."""


def makespan(
    orders: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    message: float,
    pace: Callable[[int], float],
) -> float:
    """Return the time from the first start to the last end.

    orders: the actions of each stage. seconds: of an action at pace 1. message: seconds from the end of an action until
    another stage has its result. pace: number of computing stages -> the pace of each.
    """
    last_chunk = max(action.chunk for order in orders for action in order)
    stage_of = {action.chunk: stage for stage, order in enumerate(orders) for action in order}
    ends: dict[Action, float] = {}
    left: dict[int, float] = {}
    done, now = [0] * len(orders), 0.0
    while True:
        wake = inf
        for stage, order in enumerate(orders):
            if stage in left or done[stage] == len(order):
                continue
            action = order[done[stage]]
            ready = max(
                (
                    ends.get(needed, inf) + message * (stage_of[needed.chunk] != stage)
                    for needed in _needed(action, last_chunk)
                ),
                default=now,
            )
            if ready <= now + _LEAST:
                left[stage] = seconds(action)
            else:
                wake = min(wake, ready)
        if not left and wake == inf:
            return max(ends.values())
        speed = pace(len(left)) if left else 1.0
        step = min([wake - now, *(rest / speed for rest in left.values())])
        now += step
        for stage in [*left]:
            left[stage] -= step * speed
            if left[stage] <= _LEAST:
                del left[stage]
                action = orders[stage][done[stage]]
                ends[action._replace(kind="I") if action.kind == "B" else action] = now
                done[stage] += 1


def _needed(action: Action, last_chunk: int) -> Iterator[Action]:
    """Yield the actions whose results an action needs, with I in place of B."""
    kind, chunk, micro_batch = action
    if kind == "W":
        yield Action("I", chunk, micro_batch)
    elif kind == "F":
        if chunk > 0:
            yield Action("F", chunk - 1, micro_batch)
    else:
        yield Action("F", chunk, micro_batch)
        if chunk < last_chunk:
            yield Action("I", chunk + 1, micro_batch)
