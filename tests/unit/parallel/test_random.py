"""The counter-based generator: published answers, slices, and the shape of what it draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.random import normal_box, philox
from megalite.topology.sharding import Box

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer file of Random123, philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


@given(
    rows=st.tuples(st.integers(0, 20), st.integers(1, 9)),
    columns=st.tuples(st.integers(0, 30), st.integers(1, 11)),
)
def test_any_region_equals_that_region_of_the_whole(rows, columns):
    whole = normal_box(5, "weight", Box((0, 0), (29, 41)), 1.0)
    part = normal_box(5, "weight", Box((rows[0], columns[0]), (rows[1], columns[1])), 1.0)
    assert torch.equal(part, whole[rows[0] : sum(rows), columns[0] : sum(columns)])


def test_seed_name_and_step_each_change_every_value():
    box = Box((0,), (64,))
    draws = [
        normal_box(1, "a", box, 1.0),
        normal_box(2, "a", box, 1.0),
        normal_box(1, "b", box, 1.0),
        normal_box(1, "a", box, 1.0, step=1),
    ]
    for index, one in enumerate(draws):
        for other in draws[index + 1 :]:
            assert (one != other).all()


def test_values_are_standard_normal():
    values = normal_box(3, "w", Box((0, 0), (1000, 1000)), 1.0)
    assert abs(values.mean()) < 5e-3
    assert abs(values.var() - 1) < 1e-2
    for quantile, expected in ((0.1, -1.2816), (0.5, 0.0), (0.975, 1.9600)):
        assert abs(values.flatten()[::7].quantile(quantile) - expected) < 2e-2
    # Neighbours share a counter: they must not share anything else.
    for shift in (1, 2, 3):
        assert abs((values[:, :-shift] * values[:, shift:]).mean()) < 5e-3
