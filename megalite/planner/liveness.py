"""The memory of a pipeline stage over a step: what each action of its schedule adds, and what it frees."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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

    kept: between F and B. deferred: between I and W. begun: whether a chunk has gradients.
    """

    kind: ActionKind
    chunk: int
    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    begun: tuple[bool, ...]


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
    most: dict[tuple[Any, ...], list[LiveState]] = {}
    for state in sorted(states, key=lambda state: -sum(state.kept) - sum(state.deferred)):
        fuller = most.setdefault((state.kind, state.chunk, state.begun), [])
        if not any(_covers(other, state) for other in fuller):
            fuller.append(state)
    return tuple(state for group in most.values() for state in group)


def _covers(fuller: LiveState, state: LiveState) -> bool:
    pairs = zip(fuller.kept + fuller.deferred, state.kept + state.deferred, strict=True)
    return all(more >= fewer for more, fewer in pairs)


def live_states(order: Sequence[Action]) -> Iterator[LiveState]:
    """Yield the state before each action. Activations live from F to B, a split backward's rest from I to W."""
    chunks = sorted({action.chunk for action in order})
    kept, deferred, begun = (dict.fromkeys(chunks, 0) for _ in range(3))
    for action in order:
        before = (tuple(kept.values()), tuple(deferred.values()), tuple(map(bool, begun.values())))
        yield LiveState(action.kind, action.chunk, *before)
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

    A chunk's gradients appear during its first backward, which frees its activations meanwhile.
    """
    memories = [chunks[chunk] for chunk in sorted(chunks)]
    moments = []
    for state in states:
        activations = loss = gradients = 0.0
        for memory, kept, deferred, begun in zip(
            memories, state.kept, state.deferred, state.begun, strict=True
        ):
            activations += kept * memory.layers.kept + deferred * memory.layers.deferred
            loss += kept * memory.loss.kept + deferred * memory.loss.deferred
            gradients += memory.gradients * begun
        here = chunks[state.chunk]
        layers, of_loss, zero = here.layers, here.loss, here.zero
        gathered = gradients + zero.gathered
        if state.kind == FORWARD:
            working = 0.0 if of_loss.kept else layers.forward
            with_loss = loss + of_loss.kept + of_loss.forward
            moments.append(StageMoment(activations + layers.kept + working, with_loss, gathered))
            if zero.prefetched:
                of_layers = activations + layers.kept + layers.forward
                moments.append(StageMoment(of_layers, loss, gathered + zero.prefetched))
        elif state.kind == WEIGHT:
            moments.append(StageMoment(activations, loss, gradients))
        else:
            first = not state.begun[sorted(chunks).index(state.chunk)]
            # The loss comes first, with all that is kept; then the layers, once the logits are freed.
            early = here.head_gradient if first and state.kind != INPUT else 0.0
            early += here.head_product if state.kind != INPUT else 0.0
            moments.append(StageMoment(activations, loss + of_loss.backward, gathered + early))
            rest = loss - of_loss.kept
            moments.append(StageMoment(activations + layers.backward, rest, gathered + here.waiting))
            # At the end the gradients are there, and the activations are not.
            own = here.gradients if first and state.kind != INPUT else 0.0
            own += (zero.first if first else zero.later) + zero.table
            left = activations - layers.kept
            moments.append(StageMoment(left + layers.backward, rest, gradients + own + zero.bucket))
            moments.append(StageMoment(left, rest, gradients + own + max(zero.bucket, here.table)))
    return moments
