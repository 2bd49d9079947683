"""The memory of a pipeline stage over a step: what each action of its schedule adds, and what it frees."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add, ge, mul
from typing import NamedTuple

from megalite.planner.activations import Activations
from megalite.planner.zero_buffers import NO_BUFFERS, ZeroBuffers
from megalite.topology.schedules import FORWARD, INPUT, SCHEDULES, WEIGHT, Action, ActionKind

_NOTHING = Activations()


@dataclass(frozen=True)
class ChunkMemory:
    """The bytes that a chunk keeps of a micro batch, by kind; gradients: of its weights, from the first backward on.

    head_gradient: the share of them that is there before the logits are freed. head_product: a gradient of the head on
    its way to the sum. waiting: a gradient of the head that a tied embedding's is added to. table: what that needs at
    the end of a backward.
    """

    layers: Activations
    loss: Activations = _NOTHING
    gradients: float = 0.0
    head_gradient: float = 0.0
    head_product: float = 0.0
    waiting: float = 0.0
    table: float = 0.0
    zero: ZeroBuffers = NO_BUFFERS


class StageMoment(NamedTuple):
    """The bytes of a stage by kind at one moment of a step."""

    activations: float
    loss: float
    gradients: float

    @property
    def total(self) -> float:
        return self.activations + self.loss + self.gradients


class LiveState(NamedTuple):
    """The state of a stage before an action: numbers of micro batches, by the stage's chunks in ascending order.

    is_first: no backward of the action's chunk came before. numbers: of each chunk the micro batches between F and B,
    then of each those between I and W, then of each whether it has gradients.
    """

    kind: ActionKind
    chunk: int
    is_first: bool
    numbers: tuple[int, ...]

    @property
    def alive(self) -> int:
        """The micro batches of which activations are kept, of all chunks."""
        return sum(self.numbers[: len(self.numbers) // 3 * 2])


def schedule_states(
    name: str, stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[LiveState, ...]:
    """Return the states of a stage under a schedule in which the most is alive: no other one of the same action has
    as much or more."""
    if not SCHEDULES[name].keeps_all:
        micro_batches = SCHEDULES[name].repeating_micro_batches(stages, micro_batches)
    return _fullest_states(name, stage, stages, micro_batches, chunks)


@lru_cache(maxsize=4096)
def _fullest_states(
    name: str, stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[LiveState, ...]:
    states = set(live_states(SCHEDULES[name].order(stage, stages, micro_batches, chunks)))
    most: dict[tuple[ActionKind, int, bool], list[LiveState]] = {}
    for state in sorted(states, key=lambda state: -sum(state.numbers)):
        fuller = most.setdefault((state.kind, state.chunk, state.is_first), [])
        if not any(_covers(other, state) for other in fuller):
            fuller.append(state)
    return tuple(state for group in most.values() for state in group)


def _covers(fuller: LiveState, state: LiveState) -> bool:
    return all(map(ge, fuller.numbers, state.numbers))


def live_states(order: Sequence[Action]) -> Iterator[LiveState]:
    """Yield the state before each action. Activations live from F to B, a split backward's rest from I to W."""
    chunks = sorted({action.chunk for action in order})
    kept, deferred, begun = (dict.fromkeys(chunks, 0) for _ in range(3))
    for action in order:
        numbers = (*kept.values(), *deferred.values(), *begun.values())
        yield LiveState(action.kind, action.chunk, not begun[action.chunk], numbers)
        if action.kind == FORWARD:
            kept[action.chunk] += 1
        elif action.kind == WEIGHT:
            deferred[action.chunk] -= 1
        else:
            kept[action.chunk] -= 1
            deferred[action.chunk] += action.kind == INPUT
        begun[action.chunk] |= action.kind not in (FORWARD, INPUT)


def stage_moments(states: Sequence[LiveState], chunks: Mapping[int, ChunkMemory]) -> list[StageMoment]:
    """Return the moments of a stage's actions at which its memory may be highest.

    Before actions that change as much, only the states with the most bytes in all, of activations, or of gradients.
    """
    memories = [chunks[chunk] for chunk in sorted(chunks)]
    none = [0.0] * len(memories)
    layers, losses = [memory.layers for memory in memories], [memory.loss for memory in memories]
    activations = [*(of.kept for of in layers), *(of.deferred for of in layers), *none]
    loss = [*(of.kept for of in losses), *(of.deferred for of in losses), *none]
    gradients = [*none, *none, *(memory.gradients for memory in memories)]
    alive = list(map(add, activations, loss))
    measures = (list(map(add, alive, gradients)), alive, gradients)
    alike: dict[tuple[ActionKind, int, bool], list[LiveState]] = {}
    for state in states:
        alike.setdefault(state[:3], []).append(state)
    moments: list[StageMoment] = []
    for (kind, chunk, first), group in alike.items():
        most = {max(group, key=partial(_bytes, each)) for each in measures} if len(group) > 1 else group
        for state in most:
            before = StageMoment(
                *(_bytes(bytes_each, state) for bytes_each in (activations, loss, gradients))
            )
            moments += _action_moments(kind, chunks[chunk], first, before)
    return moments


def _bytes(bytes_each: Sequence[float], state: LiveState) -> float:
    return sum(map(mul, state.numbers, bytes_each))


def _action_moments(
    kind: ActionKind, here: ChunkMemory, first: bool, before: StageMoment
) -> Iterator[StageMoment]:
    """Yield the moments of an action of a chunk. first: none of its gradients are there. before: what is kept.

    A chunk's gradients appear during its first backward, which frees its activations meanwhile.
    """
    activations, loss, gradients = before
    layers, of_loss, zero = here.layers, here.loss, here.zero
    gathered = gradients + zero.gathered
    if kind == FORWARD:
        working = 0.0 if of_loss.kept else layers.forward
        with_loss = loss + of_loss.kept + of_loss.forward
        yield StageMoment(activations + layers.kept + working, with_loss, gathered)
        if zero.prefetched:
            of_layers = activations + layers.kept + layers.forward
            yield StageMoment(of_layers, loss, gathered + zero.prefetched)
    elif kind == WEIGHT:
        yield before
    else:
        # The loss comes first, with all that is kept; then the layers, once the logits are freed.
        early = here.head_gradient if first and kind != INPUT else 0.0
        early += here.head_product if kind != INPUT else 0.0
        yield StageMoment(activations, loss + of_loss.backward, gathered + early)
        rest = loss - of_loss.kept
        yield StageMoment(activations + layers.backward, rest, gathered + here.waiting)
        # At the end the gradients are there, and the activations are not.
        own = here.gradients if first and kind != INPUT else 0.0
        own += zero.first if first else zero.later
        left = activations - layers.kept
        # ZeRO 3 has freed hardly any weights when it reduces its first bucket.
        yield StageMoment(left + layers.backward, rest, gathered + own + zero.bucket)
        yield StageMoment(left, rest, gradients + own + zero.table + max(zero.bucket, here.table))
