"""Ranks, coordinates and groups: pure arithmetic, for all small sizes."""

from dataclasses import fields
from itertools import combinations, product

import pytest

from megalite.topology.axes import AXES, ROLES, Coordinates, Layout

LAYOUTS = [Layout(*sizes) for sizes in product(range(1, 5), repeat=3)]
SUBSETS = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == [
        Coordinates(pp=pp, dp=dp, tp=tp)
        for pp, dp, tp in product(range(layout.pipeline), range(layout.data), range(layout.tensor))
    ]


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


def test_an_axis_stands_in_the_table_the_layout_and_the_coordinates() -> None:
    assert {each.name for each in fields(Coordinates)} == set(AXES)
    assert {each.name for each in fields(Layout)} == {*AXES.values(), "expert", "expert_tensor"}
    assert all(set(axes) <= set(AXES) for axes in ROLES.values())


def test_every_axis_splits_the_tokens_or_the_model() -> None:
    """An axis that neither role has would lose gradients, one that both have would count them twice."""
    assert {*ROLES["dense_gradients"], *ROLES["replica"]} == set(AXES)
    assert not set(ROLES["dense_gradients"]) & set(ROLES["replica"])
    assert set(ROLES["batch"]) <= set(ROLES["loss"]) <= set(ROLES["dense_gradients"])


@pytest.mark.parametrize(
    ("expert", "expert_tensor"), [(1, None), (2, None), (4, None), (1, 1), (2, 1), (8, 1)], ids=str
)
def test_experts_lay_out_the_ranks_of_a_stage_again(expert: int, expert_tensor: int | None) -> None:
    layout = Layout(pipeline=2, data=2, context=2, tensor=2, expert=expert, expert_tensor=expert_tensor)
    sizes = layout.expert_sizes
    assert sizes == {"edp": 8 // expert // sizes["etp"], "ep": expert, "etp": expert_tensor or 2}
    for rank in range(layout.world_size):
        peers = layout.expert_peers(rank)
        assert {axis: len(ranks) for axis, ranks in peers.items()} == sizes
        for axis, ranks in peers.items():
            assert rank in ranks and list(ranks) == sorted(ranks)
            assert all(layout.expert_peers(other)[axis] == ranks for other in ranks)
            assert {layout.coordinates(other).pp for other in ranks} == {layout.coordinates(rank).pp}
        # Two axes share one rank alone.
        assert all(set(peers[a]) & set(peers[b]) == {rank} for a, b in combinations(peers, 2))
    if expert_tensor is None:
        assert all(layout.expert_peers(rank)["etp"] == layout.peers(rank, "tp") for rank in range(16))
    if sizes["ep"] == 1 and expert_tensor is None:
        assert all(layout.expert_peers(rank)["edp"] == layout.peers(rank, "dp", "cp") for rank in range(16))


def test_experts_that_do_not_divide_a_stage_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 ranks of a stage are no multiple of expert 4 \* 2 ranks each"):
        Layout(data=2, tensor=2, expert=4).expert_peers(0)
