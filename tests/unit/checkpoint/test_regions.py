"""Runs of fused parameters and boxes, against index tables built element by element."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.regions import contains, intersection, slices, split_flat_range, stretches
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
    boxes = spec.boxes(rank, size)
    # What each element of the flattened local tensor is, written out one by one.
    elements = [(part.name, index) for part, box in boxes for index in range(box.numel)]
    runs = list(split_flat_range(boxes, start, numel))
    assert [(run.part.name, index) for run in runs for index in range(run.start, run.stop)] == elements[
        start : start + numel
    ]
    assert len({run.part.name for run in runs}) == len(runs)
    position = 0
    for run in runs:
        assert run.offset == position and run.numel > 0
        position += run.numel
    assert position == numel


boxes_2d = st.builds(
    TensorSlice,
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)


def cells(box: TensorSlice) -> set[tuple[int, int]]:
    (row, column), (rows, columns) = box.offsets, box.shape
    return {(i, j) for i in range(row, row + rows) for j in range(column, column + columns)}


@given(boxes_2d, boxes_2d)
def test_an_intersection_holds_the_common_cells(one: TensorSlice, other: TensorSlice) -> None:
    common = intersection(one, other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)
    if common:
        rows, columns = slices(common, one)
        inside = {
            (i + one.offsets[0], j + one.offsets[1]) for i in range(12)[rows] for j in range(12)[columns]
        }
        assert inside == cells(common)


@given(boxes_2d)
def test_a_box_is_contained_when_all_its_cells_are(box: TensorSlice) -> None:
    assert contains((6, 7), box) == (cells(box) <= cells(TensorSlice((0, 0), (6, 7))))


def test_a_box_of_other_dims_is_not_contained() -> None:
    assert not contains((6,), TensorSlice((0, 0), (1, 1)))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4))
def test_the_stretches_of_a_region_are_its_elements_in_order(dims: list[tuple[int, int, int]]) -> None:
    full = tuple(size for size, _, _ in dims)
    offsets = tuple(min(low, size) for size, low, _ in dims)
    box = TensorSlice(
        offsets, tuple(min(wanted, size - low) for (size, _, wanted), low in zip(dims, offsets, strict=True))
    )
    numbers = torch.arange(prod(full)).view(full)
    expected = numbers[slices(box, TensorSlice((0,) * len(full), full))].flatten().tolist()
    found = list(stretches(full, box))
    assert [start + i for start, numel in found for i in range(numel)] == expected
    # No two could have been one.
    assert all(start + numel != following for (start, numel), (following, _) in pairwise(found))
