"""Which probabilities of attention drop: any region of the whole, the share asked for, nothing that goes together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops import counter
from megalite.ops.counter import MASK_LEVELS, keep_probabilities
from tests.support.parity import assert_mean

SAMPLES = torch.tensor([5, 6, 2**32 + 5, 2**40])


def kept(
    *,
    key: tuple[int, int] = (7, 8),
    sample_indices: Tensor = SAMPLES,
    heads: range = range(4),
    queries: range = range(256),
    keys: range = range(1024),
    dropped: int = MASK_LEVELS // 2,
) -> Tensor:
    return keep_probabilities(key, sample_indices, heads, queries, keys, dropped=dropped)


WHOLE = kept(keys=range(64), queries=range(-8, 24))


@given(
    queries=st.tuples(st.integers(-8, 10), st.integers(1, 12)),
    keys=st.tuples(st.integers(0, 40), st.integers(1, 24)),
    heads=st.tuples(st.integers(0, 2), st.integers(1, 2)),
    sample_indices=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_any_region_is_that_region_of_the_whole(queries, keys, heads, sample_indices):
    of_queries, of_keys, of_heads = (range(each[0], sum(each)) for each in (queries, keys, heads))
    part = kept(sample_indices=SAMPLES[sample_indices], heads=of_heads, queries=of_queries, keys=of_keys)
    within = WHOLE[sample_indices, of_heads.start : of_heads.stop, of_queries.start + 8 : of_queries.stop + 8]
    assert torch.equal(part, within[..., of_keys.start : of_keys.stop])


def test_blocks_of_rows_do_not_show(monkeypatch):
    whole = kept(keys=range(100), queries=range(20))
    monkeypatch.setattr(counter, "_BLOCK", 700)
    assert torch.equal(kept(keys=range(100), queries=range(20)), whole)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_kept_values_is_what_was_asked_for_in_every_row_and_column(share):
    dropped = round(share * MASK_LEVELS)
    mask, expected = kept(dropped=dropped).double(), 1 - dropped / MASK_LEVELS
    variance = expected * (1 - expected)
    assert_mean(mask, expected, deviation=variance**0.5)
    # Sums over rows, columns and short runs of keys scatter as those of independent values do.
    for sums, count in (
        (mask.sum(-1), mask.shape[-1]),
        (mask.sum(-2), mask.shape[-2]),
        (mask.unflatten(-1, (-1, 16)).sum(-1), 16),
    ):
        scatter = sums.var().item() / (count * variance)
        # The deviation of a sample's variance, of values with the kurtosis of such a sum.
        allowed = ((2 + (1 / variance - 6) / count) / sums.numel()) ** 0.5
        assert abs(scatter - 1) < 5 * allowed, count


def test_every_level_of_the_16_bits_counts():
    one_in_all, all_but_one = kept(dropped=1), kept(dropped=MASK_LEVELS - 1)
    assert 0.5 < (~one_in_all).sum().item() * MASK_LEVELS / one_in_all.numel() < 1.6
    assert 0.5 < all_but_one.sum().item() * MASK_LEVELS / all_but_one.numel() < 1.6
    assert kept(dropped=0).all()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_neighbours_have_nothing_to_do_with_each_other(share):
    dropped = round(share * MASK_LEVELS)
    mask, other = (kept(key=key, dropped=dropped).double() for key in ((7, 8), (7, 9)))
    chance = 1 - dropped / MASK_LEVELS
    one, other = ((each - chance) / (chance * (1 - chance)) ** 0.5 for each in (mask, other))
    pairs = {
        "key of the generator": (one, other),
        "sample": (one[0], one[1]),
        "high word of the sample": (one[0], one[2]),
        "head": (one[:, :-1], one[:, 1:]),
        "query": (one[:, :, :-1], one[:, :, 1:]),
        "diagonal": (one[:, :, :-1, :-1], one[:, :, 1:, 1:]),
        # Where the sequence of a row, by steps of the golden ratio, comes nearest to where it was.
        **{f"key + {by}": (one[..., :-by], one[..., by:]) for by in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 610)},
    }
    for what, (first, second) in pairs.items():
        assert_mean(first * second, 0.0, what=what)
    triples = one[..., :-5] * one[..., 2:-3] * one[..., 5:]
    assert_mean(triples, 0.0)
