"""The memory of a pipeline stage over a step: what each action of its schedule adds, and what it frees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.planner.activations import Activations
from megalite.topology.schedules import FORWARD, INPUT, WEIGHT, Action

_NOTHING = Activations()


@dataclass(frozen=True)
class ChunkMemory:
    """The bytes that a chunk keeps of a micro batch, by kind; gradients: of its weights, from the first backward on.

    head_gradient: the share of them that is there before the logits are freed.
    """

    layers: Activations
    loss: Activations = _NOTHING
    gradients: float = 0.0
    head_gradient: float = 0.0


@dataclass(frozen=True)
class StageMoment:
    """The bytes of a stage by kind at one moment of a step."""

    activations: float
    loss: float
    gradients: float

    @property
    def total(self) -> float:
        return self.activations + self.loss + self.gradients


@dataclass
class _Now:
    activations: float = 0.0
    loss: float = 0.0
    gradients: float = 0.0

    def with_working(self, layers: float = 0.0, loss: float = 0.0, gradients: float = 0.0) -> StageMoment:
        return StageMoment(self.activations + layers, self.loss + loss, self.gradients + gradients)


def stage_moments(order: Sequence[Action], chunks: Mapping[int, ChunkMemory]) -> list[StageMoment]:
    """Return the moments of a stage's actions at which its memory may be highest.

    Activations live from F to B; of a split backward, what the weight gradients need lives from I to W. A chunk's
    gradients appear during its first backward, which frees its activations meanwhile.
    """
    now, begun = _Now(), set[int]()
    moments = [StageMoment(0.0, 0.0, 0.0)]
    for action in order:
        chunk = chunks[action.chunk]
        layers, loss = chunk.layers, chunk.loss
        if action.kind == FORWARD:
            now.activations += layers.kept
            now.loss += loss.kept
            moments.append(now.with_working(layers.forward if not loss.kept else 0.0, loss.forward))
            continue
        if action.kind == WEIGHT:
            now.activations -= layers.deferred
            now.loss -= loss.deferred
        else:
            # First the loss, with all that is kept; then the layers, once the logits are freed.
            early = 0.0 if action.chunk in begun or action.kind == INPUT else chunk.head_gradient
            moments.append(now.with_working(0.0, loss.backward, early))
            now.loss -= loss.kept
            moments.append(now.with_working(layers.backward))
            now.activations -= layers.kept
            if action.kind == INPUT:
                now.activations += layers.deferred
                now.loss += loss.deferred
        if action.chunk not in begun and action.kind != INPUT:
            begun.add(action.chunk)
            now.gradients += chunk.gradients
        moments.append(now.with_working(layers.backward if action.kind != WEIGHT else 0.0))
    return moments
