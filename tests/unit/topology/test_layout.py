"""Ranks and coordinates, groups, and the layers of stages: pure arithmetic, for all small sizes."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.topology.layout import AXES, Coordinates, Layout, balanced_split, pipeline_split

LAYOUTS = [Layout(*sizes) for sizes in product(range(1, 5), repeat=3)]
SUBSETS = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(at) for at in places] == list(range(layout.world_size))
    assert set(places) == {
        Coordinates(pp, dp, tp)
        for pp, dp, tp in product(range(layout.pipeline), range(layout.data), range(layout.tensor))
    }


def test_the_order_of_ranks_is_that_of_megatron_and_deepspeed() -> None:
    layout = Layout(pipeline=2, data=3, tensor=4)
    assert layout.coordinates(1) == Coordinates(pp=0, dp=0, tp=1)
    assert layout.coordinates(4) == Coordinates(pp=0, dp=1, tp=0)
    assert layout.coordinates(12) == Coordinates(pp=1, dp=0, tp=0)
    assert layout.describe(17) == "rank 17 (pp 1, dp 1, tp 1)"
    for rank in (-1, 24):
        with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 24"):
            layout.coordinates(rank)


@pytest.mark.parametrize("axes", SUBSETS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[::5], ids=str)
def test_groups_are_a_partition_and_peers_share_the_other_axes(layout: Layout, axes: tuple[str, ...]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert list(groups) == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        for axis in set(AXES) - set(axes):
            assert len({getattr(layout.coordinates(rank), axis) for rank in group}) == 1
        assert all(layout.peers(rank, *axes) == group for rank in group)


@given(st.integers(0, 200), st.integers(1, 40))
def test_a_balanced_split_covers_all_with_sizes_that_differ_by_one(total: int, parts: int) -> None:
    runs = balanced_split(total, parts)
    assert [item for run in runs for item in run] == list(range(total))
    sizes = [len(run) for run in runs]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 130), st.data())
def test_every_layer_stands_on_exactly_one_stage(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    runs = pipeline_split(layers, stages).layers
    assert [layer for run in runs for layer in run] == list(range(layers))
    sizes = [len(run) for run in runs]
    assert len(sizes) == stages
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert pipeline_split(layers, stages, given=sizes).layers == runs


def test_the_extra_layers_go_to_the_middle() -> None:
    assert [len(run) for run in pipeline_split(6, 4).layers] == [1, 2, 2, 1]
    assert [len(run) for run in pipeline_split(7, 3).layers] == [2, 3, 2]


@pytest.mark.parametrize(
    ("layers", "stages", "given_split"),
    [(4, 2, [1, 2]), (4, 2, [2, 3]), (4, 2, [4]), (4, 2, [4, 0]), (4, 2, [5, -1]), (4, 2, []), (4, 5, None)],
)
def test_a_split_that_drops_or_repeats_a_layer_is_refused(
    layers: int, stages: int, given_split: list[int] | None
) -> None:
    with pytest.raises(ValueError, match=r"not a split|cannot each have one"):
        pipeline_split(layers, stages, given=given_split)


def test_a_given_split_is_taken() -> None:
    assert pipeline_split(6, 3, given=[1, 3, 2]).layers == (range(0, 1), range(1, 4), range(4, 6))
