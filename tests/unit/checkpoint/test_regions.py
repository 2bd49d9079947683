"""Runs of fused parameters and regions, against index tables built element by element."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.regions import contains, index_in, intersection, split_flat_range, stretches
from megalite.topology.sharding import Part, ShardSpec, TensorSlice


@st.composite
def fused_runs(draw: st.DrawFn) -> tuple[ShardSpec, int, int, int, int]:
    """A fused spec, a tensor-parallel rank and size, and a run of its flattened local tensor."""
    columns = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    spec = ShardSpec(
        tuple(Part(f"part-{index}", (size, columns)) for index, size in enumerate(rows)),
        draw(st.sampled_from([0, 1, None])),
    )
    size = draw(st.integers(1, 5))
    rank = draw(st.integers(0, size - 1))
    total = prod(spec.local_shape(rank, size))
    start = draw(st.integers(0, total))
    return spec, rank, size, start, draw(st.integers(0, total - start))


@given(fused_runs())
def test_a_run_splits_into_one_run_a_part(case: tuple[ShardSpec, int, int, int, int]) -> None:
    spec, rank, size, start, numel = case
    regions = spec.slices(rank, size)
    # The origin of each element of the flattened local tensor, enumerated one by one.
    elements = [(part.name, index) for part, region in regions for index in range(region.numel)]
    runs = list(split_flat_range(regions, start, numel))
    assert [(run.part.name, index) for run in runs for index in range(run.start, run.stop)] == elements[
        start : start + numel
    ]
    assert len({run.part.name for run in runs}) == len(runs)
    position = 0
    for run in runs:
        assert run.offset == position and run.numel > 0
        position += run.numel
    assert position == numel


regions_2d = st.builds(
    TensorSlice,
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)


def cells(region: TensorSlice) -> set[tuple[int, int]]:
    (row, column), (rows, columns) = region.offsets, region.shape
    return {(i, j) for i in range(row, row + rows) for j in range(column, column + columns)}


@given(regions_2d, regions_2d)
def test_an_intersection_holds_the_common_cells(one: TensorSlice, other: TensorSlice) -> None:
    common = intersection(one, other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)
    if common:
        rows, columns = index_in(common, one)
        inside = {
            (i + one.offsets[0], j + one.offsets[1]) for i in range(12)[rows] for j in range(12)[columns]
        }
        assert inside == cells(common)


@given(regions_2d)
def test_a_region_is_contained_when_all_its_cells_are(region: TensorSlice) -> None:
    assert contains((6, 7), region) == (cells(region) <= cells(TensorSlice((0, 0), (6, 7))))


def test_a_region_of_other_dims_is_not_contained() -> None:
    assert not contains((6,), TensorSlice((0, 0), (1, 1)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4))
def test_the_stretches_of_a_region_are_its_elements_in_order(dims: list[tuple[int, int, int]]) -> None:
    full = tuple(size for size, _, _ in dims)
    offsets = tuple(min(low, size) for size, low, _ in dims)
    region = TensorSlice(
        offsets, tuple(min(wanted, size - low) for (size, _, wanted), low in zip(dims, offsets, strict=True))
    )
    numbers = torch.arange(prod(full)).view(full)
    expected = numbers[index_in(region, TensorSlice((0,) * len(full), full))].flatten().tolist()
    found = list(stretches(full, region))
    assert [start + i for start, numel in found for i in range(numel)] == expected
    # No two could have been one.
    assert all(start + numel != following for (start, numel), (following, _) in pairwise(found))
