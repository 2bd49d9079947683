"""The order of samples: complete, reproducible, and independent of everything but (seed, epoch)."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.batches.sampler import Sampler
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.parity import assert_mean

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 20_000))


@exhibit(
    "Energon#266",
    subject="data",
    there="some samples came several times in an epoch, others never",
    here="every epoch has each sample exactly once",
    fault=faults.SAMPLES_ARE_DRAWN_AGAIN,
)
@given(SIZES, st.integers(0, 2**63), st.integers(0, 1000))
def test_every_epoch_holds_each_sample_once(samples: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * samples, (epoch + 1) * samples)
    assert sorted(Sampler(samples, seed).sample_ids(positions)) == list(range(samples))


@given(SIZES, st.integers(0, 9), st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_a_position_alone_decides(samples: int, seed: int, positions: list[int]) -> None:
    sampler = Sampler(samples, seed)
    together = sampler.sample_ids(np.array(positions))
    alone = [int(sampler.sample_ids(np.array([position]))[0]) for position in positions]
    assert together.tolist() == alone
    assert all(0 <= each < samples for each in alone)


def test_without_shuffling_the_order_is_the_files() -> None:
    assert Sampler(5, 0, shuffle=False).sample_ids(np.arange(12)).tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(Sampler(50, seed).sample_ids(np.arange(epoch * 50, epoch * 50 + 50)))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


def test_the_order_is_what_it_was() -> None:
    # Literal on purpose: another order would silently change what a resumed run sees.
    assert Sampler(10, 1234).sample_ids(np.arange(20)).tolist() == [
        9,
        5,
        2,
        8,
        1,
        6,
        3,
        4,
        0,
        7,
        6,
        4,
        8,
        2,
        3,
        9,
        1,
        7,
        5,
        0,
    ]


@pytest.mark.parametrize("samples", [4, 5])
def test_all_orders_of_a_small_set_are_equally_likely(samples: int) -> None:
    expected = 30
    orders = list(permutations(range(samples)))
    rows = [
        Sampler(samples, seed).sample_ids(np.arange(samples)).tolist()
        for seed in range(len(orders) * expected)
    ]
    seen = Counter(map(tuple, rows))
    chi_squared = sum((seen[order] - expected) ** 2 / expected for order in orders)
    freedom = len(orders) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_are_scattered() -> None:
    samples = 100_003
    order = Sampler(samples, 0).sample_ids(np.arange(samples))
    scale = samples / 12**0.5
    places, drawn = ((each - (samples - 1) / 2) / scale for each in (np.arange(samples), order))
    assert_mean(places * drawn, 0.0)
    assert_mean(drawn[1:] * drawn[:-1], 0.0)
    counts = np.histogram2d(np.arange(samples), order, bins=40)[0]
    chi_squared = ((counts - samples / 1600) ** 2 / (samples / 1600)).sum()
    assert chi_squared < 1600 + 5 * (2 * 1600) ** 0.5


def test_a_trillion_samples_cost_no_more_than_ten() -> None:
    ids = Sampler(10**12, 7).sample_ids(np.arange(10**13, 10**13 + 64))
    assert len(set(ids.tolist())) == 64 and set(ids // 10**12) == {0}
