"""Which layers each pipeline stage holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


def balanced_split(total: int, parts: int) -> tuple[range, ...]:
    """`total` items in `parts` contiguous runs whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class PipelineSplit:
    """How the layers are cut into chunks, and which stage (pipeline rank) holds which chunks.

    layers: the global layer indices of each chunk, in model order. Chunks go around the stages by turns
    (Narayanan et al. 2021, "interleaved"), or, v_shaped, down the stages and up again, so that the first stage
    holds both ends of the model (Qi et al. 2024, "controllable memory").
    """

    layers: tuple[range, ...]
    stages: int = 1
    v_shaped: bool = False

    @property
    def chunks_per_stage(self) -> int:
        return len(self.layers) // self.stages

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a chunk, by its place in model order."""
        turn, place = divmod(chunk, self.stages)
        return self.stages - 1 - place if self.v_shaped and turn % 2 else place

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a stage holds, ascending."""
        return tuple(chunk for chunk in range(len(self.layers)) if self.stage_of(chunk) == stage)

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """The global layer indices that a stage holds, ascending."""
        return tuple(layer for chunk in self.chunks_of(stage) for layer in self.layers[chunk])


def pipeline_split(
    num_hidden_layers: int,
    stages: int = 1,
    *,
    chunks_per_stage: int = 1,
    v_shaped: bool = False,
    given: Sequence[int] | None = None,
) -> PipelineSplit:
    """Every layer in exactly one of stages * chunks_per_stage chunks.

    Without `given` (layers a chunk, in model order) the split is balanced; the extra layers go to the middle
    chunks, since the first also embeds and the last also holds the head.
    Raises ValueError when `given` does not cover the layers exactly or leaves a chunk empty.
    """
    chunks = stages * chunks_per_stage
    if given is None:
        if chunks > num_hidden_layers:
            raise ValueError(f"{chunks} chunks cannot each have one of {num_hidden_layers} layers")
        size, extra = divmod(num_hidden_layers, chunks)
        first = (chunks - extra + 1) // 2
        given = [size + (first <= chunk < first + extra) for chunk in range(chunks)]
    if len(given) != chunks or sum(given) != num_hidden_layers or min(given) < 1:
        raise ValueError(
            f"layers {list(given)} are not a split of {num_hidden_layers} layers over {chunks} chunks"
        )
    return PipelineSplit(tuple(_consecutive(given)), stages, v_shaped)


def _consecutive(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size
