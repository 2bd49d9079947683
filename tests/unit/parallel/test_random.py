"""The counter-based generator: published answers, slices, and the shape of what it draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.ops.counter import MASK_LEVELS, philox
from megalite.parallel import random
from megalite.parallel.random import keep_mask, normal_slice
from megalite.topology.sharding import TensorSlice
from tests.support.parity import assert_mean

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
    whole = normal_slice(5, "weight", TensorSlice((0, 0), (29, 41)), 1.0)
    part = normal_slice(5, "weight", TensorSlice((rows[0], columns[0]), (rows[1], columns[1])), 1.0)
    assert torch.equal(part, whole[rows[0] : sum(rows), columns[0] : sum(columns)])


def test_seed_name_and_step_each_change_every_value():
    region = TensorSlice((0,), (64,))
    draws = [
        normal_slice(1, "a", region, 1.0),
        normal_slice(2, "a", region, 1.0),
        normal_slice(1, "b", region, 1.0),
        normal_slice(1, "a", region, 1.0, step=1),
    ]
    for index, one in enumerate(draws):
        for other in draws[index + 1 :]:
            assert (one != other).all()


def test_values_are_standard_normal():
    values = normal_slice(3, "w", TensorSlice((0, 0), (1000, 1000)), 1.0)
    assert_mean(values, 0.0)
    assert_mean(values.square(), 1.0, deviation=2**0.5)
    for quantile, expected in ((0.1, -1.2816), (0.5, 0.0), (0.975, 1.9600)):
        below = (values < expected).double()
        assert_mean(below, quantile, deviation=(quantile * (1 - quantile)) ** 0.5)
    # Neighbours share a counter: they must not share anything else.
    for shift in (1, 2, 3):
        assert_mean(values[:, :-shift] * values[:, shift:], 0.0)


def test_words_do_not_depend_on_how_the_counter_is_broadcast():
    counter = (
        torch.arange(6),
        torch.arange(5).unsqueeze(1) + 7,
        torch.tensor([[[3]], [[ONES]]]),
        torch.tensor(1),
    )
    together = philox(tuple(word.clone() for word in torch.broadcast_tensors(*counter)), (5, 6))
    for word, expected in zip(philox(counter, (5, 6)), together, strict=True):
        assert torch.equal(word, expected)


SAMPLES = torch.tensor([5, 0, 2**32 + 5, 2**40])


def mask(
    *,
    seed: int = 1,
    name: str = "a",
    sample_indices: torch.Tensor = SAMPLES,
    positions: range = range(64),
    features: range = range(512),
    dropped: int = MASK_LEVELS // 2,
) -> torch.Tensor:
    return keep_mask(seed, name, sample_indices, positions, features, dropped=dropped)


WHOLE = mask()


@given(
    positions=st.tuples(st.integers(0, 40), st.integers(1, 24)),
    features=st.tuples(st.integers(0, 400), st.integers(1, 112)),
    sample_indices=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_any_slice_of_a_mask_equals_that_slice_of_the_whole(positions, features, sample_indices):
    rows, columns = range(positions[0], sum(positions)), range(features[0], sum(features))
    part = mask(sample_indices=SAMPLES[sample_indices], positions=rows, features=columns)
    assert torch.equal(part, WHOLE[sample_indices, rows.start : rows.stop, columns.start : columns.stop])


def test_blocks_of_counters_do_not_show(monkeypatch):
    whole = mask()
    monkeypatch.setattr(random, "_BLOCK", 200)
    assert torch.equal(mask(), whole)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_kept_values_is_what_was_asked_for(share):
    dropped = round(share * MASK_LEVELS)
    kept = mask(features=range(4096), dropped=dropped)
    expected = 1 - dropped / MASK_LEVELS
    deviation = (expected * (1 - expected)) ** 0.5
    assert_mean(kept, expected, deviation=deviation)
    # Nor does any of a counter's eight values stand out, nor any sample.
    for each in (*kept.unflatten(-1, (-1, 8)).unbind(-1), *kept.unbind(0)):
        assert_mean(each, expected, deviation=deviation)


def test_every_level_of_the_16_bits_counts():
    one_in_all = mask(features=range(1 << 14), positions=range(64), dropped=1)
    assert 0.5 < (~one_in_all).sum().item() * MASK_LEVELS / one_in_all.numel() < 1.6
    all_but_one = mask(features=range(1 << 14), dropped=MASK_LEVELS - 1)
    assert 0.5 < all_but_one.sum().item() * MASK_LEVELS / all_but_one.numel() < 1.6
    assert mask(dropped=0).all()


def test_masks_of_seeds_names_samples_positions_and_features_are_independent():
    signs = mask(features=range(4096)).double() * 2 - 1
    pairs = {
        "seed": (signs, mask(features=range(4096), seed=2).double() * 2 - 1),
        "name": (signs, mask(features=range(4096), name="b").double() * 2 - 1),
        "sample": (signs[0], signs[1]),
        "high word of the sample": (signs[0], signs[2]),
        "position": (signs[:, :-1], signs[:, 1:]),
        "halves of a word": (signs[..., ::2], signs[..., 1::2]),
        **{f"feature + {by}": (signs[..., :-by], signs[..., by:]) for by in (1, 2, 4, 8)},
    }
    for what, (one, other) in pairs.items():
        assert_mean(one * other, 0.0, what=what)
