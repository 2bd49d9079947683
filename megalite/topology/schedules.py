"""Each pipeline schedule as data: its rules and each stage's order of actions. No torch, no process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["F", "B"]


@dataclass(frozen=True)
class Action:
    """Forward ("F") or backward ("B") of one micro batch on one stage."""

    kind: ActionKind
    micro_batch: int


def gpipe_order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards (Huang et al. 2019); keeps every micro batch's activations alive."""
    forward = tuple(Action("F", index) for index in range(micro_batches))
    return forward + tuple(Action("B", index) for index in range(micro_batches))


def one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Warm up, then one forward and one backward by turns (Narayanan et al. 2019, "PipeDream-flush").

    At most `stages - stage` micro batches are in flight.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action("F", index) for index in range(warm_up)]
    for backward in range(micro_batches):
        forward = warm_up + backward
        if forward < micro_batches:
            actions.append(Action("F", forward))
        actions.append(Action("B", backward))
    return tuple(actions)


@dataclass(frozen=True)
class Schedule:
    """A schedule by its name in `parallel.schedule`."""

    name: str
    order: Callable[[int, int, int], tuple[Action, ...]]
    needs_a_micro_batch_a_stage: bool


SCHEDULES = {
    "gpipe": Schedule("gpipe", gpipe_order, False),
    "1f1b": Schedule("1f1b", one_f_one_b_order, True),
}


def in_flight_peak(actions: tuple[Action, ...]) -> int:
    """The most micro batches whose activations a stage holds at once."""
    alive = peak = 0
    for action in actions:
        alive += 1 if action.kind == "F" else -1
        peak = max(peak, alive)
    return peak


def ideal_timeline(
    name: str, stages: int, micro_batches: int, forward: int = 1, backward: int = 1
) -> dict[tuple[int, Action], int]:
    """Start time of every (stage, action) when each takes `forward` or `backward` units and transfers are free.

    Raises ValueError when the stages' orders wait for each other for ever.
    """
    orders = [list(SCHEDULES[name].order(stage, stages, micro_batches)) for stage in range(stages)]
    starts: dict[tuple[int, Action], int] = {}
    free_at = [0] * stages
    position = [0] * stages
    durations = {"F": forward, "B": backward}
    while any(position[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                action = orders[stage][position[stage]]
                needed = list(_needs(stage, stages, action))
                if any(need not in starts for need in needed):
                    break
                ready = max((starts[need] + durations[need[1].kind] for need in needed), default=0)
                starts[stage, action] = max(ready, free_at[stage])
                free_at[stage] = starts[stage, action] + durations[action.kind]
                position[stage] += 1
                moved = True
        if not moved:
            raise ValueError(
                f"schedule {name} deadlocks with {stages} stages and {micro_batches} micro batches"
            )
    return starts


def _needs(stage: int, stages: int, action: Action) -> Iterator[tuple[int, Action]]:
    """What must have ended before `action` can start on `stage`."""
    if action.kind == "F":
        if stage > 0:
            yield stage - 1, action
    else:
        yield stage, Action("F", action.micro_batch)
        if stage < stages - 1:
            yield stage + 1, action
