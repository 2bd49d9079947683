"""Layers are spread so that the longest stage is as short as it can be; the head counts."""

from itertools import combinations

import pytest

from megalite.topology.balance import balanced_layers
from megalite.topology.flops import forward_flops
from megalite.topology.stages import pipeline_split
from tests.support.tiny import tiny_shape


def longest_stage(
    sizes: tuple[int, ...], costs: list[float], head: float, stages: int, v_shaped: bool
) -> float:
    split = pipeline_split(
        len(costs), stages, chunks_per_stage=len(sizes) // stages, v_shaped=v_shaped, layers_per_chunk=sizes
    )
    last = split.stage_of(len(sizes) - 1)
    return max(
        sum(costs[layer] for layer in split.layers_of(stage)) + head * (stage == last)
        for stage in range(stages)
    )


def splits(layers: int, chunks: int) -> list[tuple[int, ...]]:
    """All ways to cut the layers into chunks."""
    cuts = combinations(range(1, layers), chunks - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


@pytest.mark.parametrize(
    ("stages", "chunks", "v_shaped"),
    [(2, 1, False), (3, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)],
)
@pytest.mark.parametrize("head", [0, 0.5, 2, 3.5, 11])
def test_no_split_has_a_shorter_longest_stage(stages: int, chunks: int, v_shaped: bool, head: float) -> None:
    for layers in range(stages * chunks, 13):
        costs = [1.0] * layers
        sizes = balanced_layers(costs, head, stages, chunks_per_stage=chunks, v_shaped=v_shaped)
        assert sum(sizes) == layers and len(sizes) == stages * chunks and min(sizes) >= 1
        found = longest_stage(sizes, costs, head, stages, v_shaped)
        best = min(
            longest_stage(each, costs, head, stages, v_shaped) for each in splits(layers, stages * chunks)
        )
        assert found == best, (layers, sizes)


def test_layers_with_a_window_are_cheaper() -> None:
    """Every second layer costs half."""
    costs = [1.0, 0.5] * 6
    sizes = balanced_layers(costs, 0.0, 3)
    assert longest_stage(sizes, costs, 0.0, 3, v_shaped=False) == 3.0


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    flops = forward_flops(tiny_shape(layers=8), 16)
    large = flops.layers[0] * 3.2
    assert balanced_layers(flops.layers, large, 2) == (6, 2)
    assert balanced_layers(flops.layers, 0, 2) == (4, 4)


def test_fewer_layers_than_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot each have one"):
        balanced_layers([1.0], 1.0, 2)
