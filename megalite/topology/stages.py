"""The split of the layers over chunks and pipeline stages. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise


@lru_cache(maxsize=1024)
def balanced_split(total: int, parts: int) -> tuple[range, ...]:
    """Split range(total) into `parts` contiguous ranges whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(total, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class PipelineSplit:
    """The layers of each chunk, and the chunks of each stage (pipeline rank).

    layers: the global layer indices of each chunk, in model order.
    v_shaped: False: chunk c is on stage c % stages, as in interleaved schedules (Narayanan et al. 2021). True: chunks
        go from the first stage to the last and back, so the first stage holds the first and the last chunk of the
        model (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").
    """

    layers: tuple[range, ...]
    stages: int = 1
    v_shaped: bool = False

    @property
    def chunks_per_stage(self) -> int:
        return len(self.layers) // self.stages

    def stage_of(self, chunk: int) -> int:
        """Return the stage that holds chunk number `chunk` in model order."""
        turn, place = divmod(chunk, self.stages)
        return self.stages - 1 - place if self.v_shaped and turn % 2 else place

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks of a stage, ascending."""
        return self._chunks[stage]

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Return the global layer indices of a stage, ascending."""
        return self._layers[stage]

    # The planner asks for both a hundred thousand times.
    @cached_property
    def _chunks(self) -> tuple[tuple[int, ...], ...]:
        chunks: list[list[int]] = [[] for _ in range(self.stages)]
        for chunk in range(len(self.layers)):
            chunks[self.stage_of(chunk)].append(chunk)
        return tuple(map(tuple, chunks))

    @cached_property
    def _layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(layer for chunk in chunks for layer in self.layers[chunk]) for chunks in self._chunks
        )


def pipeline_split(
    num_hidden_layers: int,
    stages: int = 1,
    *,
    chunks_per_stage: int = 1,
    v_shaped: bool = False,
    layers_per_chunk: Sequence[int] | None = None,
) -> PipelineSplit:
    """Split the layers over stages * chunks_per_stage chunks.

    layers_per_chunk: in model order. None: sizes differ by at most one; the larger chunks are in the middle, because
        the first chunk also holds the embedding and the last one the head.
    Raises ValueError when there are fewer layers than chunks, or `layers_per_chunk` does not sum to the layers.
    """
    chunks = stages * chunks_per_stage
    if layers_per_chunk is None:
        if chunks > num_hidden_layers:
            raise ValueError(f"{chunks} chunks cannot each have one of {num_hidden_layers} layers")
        size, extra = divmod(num_hidden_layers, chunks)
        first = (chunks - extra + 1) // 2
        layers_per_chunk = [size + (first <= chunk < first + extra) for chunk in range(chunks)]
    if (
        len(layers_per_chunk) != chunks
        or sum(layers_per_chunk) != num_hidden_layers
        or min(layers_per_chunk) < 1
    ):
        raise ValueError(
            f"layers {list(layers_per_chunk)} are not a split of {num_hidden_layers} layers over {chunks} chunks"
        )
    return PipelineSplit(tuple(_consecutive(layers_per_chunk)), stages, v_shaped)


def _consecutive(sizes: Sequence[int]) -> Iterator[range]:
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size
