"""The number of layers of each chunk, chosen so that the stages of a pipeline work equally long. No torch."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from megalite.topology.stages import pipeline_split


def balanced_layers(
    layer_costs: Sequence[float],
    head_cost: float,
    stages: int,
    *,
    chunks_per_stage: int = 1,
    v_shaped: bool = False,
) -> tuple[int, ...]:
    """Return the layers of each chunk, in model order: the longest stage is as short as moving single layers makes it.

    layer_costs, head_cost: in any unit; the head is on the last chunk. Every chunk has a layer.
    Raises ValueError when there are fewer layers than chunks.
    """
    split = pipeline_split(len(layer_costs), stages, chunks_per_stage=chunks_per_stage, v_shaped=v_shaped)
    sizes = tuple(len(layers) for layers in split.layers)
    prefix = [0.0, *accumulate(layer_costs)]

    def cost(sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Return what each stage takes, and each chunk, the longest first: a step waits for the longest of all."""
        ends = [*accumulate(sizes)]
        chunks = [prefix[end] - prefix[end - size] for end, size in zip(ends, sizes, strict=True)]
        chunks[-1] += head_cost
        of_stages = [sum(chunks[chunk] for chunk in split.chunks_of(stage)) for stage in range(stages)]
        return sorted(of_stages, reverse=True), sorted(chunks, reverse=True)

    best = cost(sizes)
    while True:
        cheaper = min(((cost(each), each) for each in _neighbours(sizes)), default=None)
        if cheaper is None or cheaper[0] >= best:
            return sizes
        best, sizes = cheaper


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes after one layer has moved from any chunk to any other; those between pass one on."""
    for giver, size in enumerate(sizes):
        for taker in range(len(sizes)) if size > 1 else ():
            if taker != giver:
                moved = [*sizes]
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)
