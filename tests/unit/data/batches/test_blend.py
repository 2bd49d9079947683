"""Several sets by weight: shares at every prefix, each set's own order and epochs, alike in every layout."""

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.batches.blend import (
    BlendedSamples,
    ChangingOrder,
    SampleOrder,
    SetOrder,
    WeightChange,
    seed_of_set,
    whole_shares,
)
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.batches.packing import PackedSamples
from megalite.data.batches.sampler import Sampler
from megalite.data.files.token_file import TokenFile
from megalite.errors import DataError
from tests.unit.data.batches.test_loader import LENGTH, rows, token_file

SHARES = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(SHARES)
@settings(max_examples=300)
def test_after_every_step_each_set_is_within_one_of_its_share(shares: list[int]) -> None:
    order = SetOrder(shares)
    sets, turns = order.look_up(np.arange(3 * order.period))
    taken = [0] * len(shares)
    bound = 1 - Fraction(1, max(1, 2 * len(shares) - 2)) if len(shares) > 1 else 0
    for step, (each, turn) in enumerate(zip(sets.tolist(), turns.tolist(), strict=True), start=1):
        assert turn == taken[each]
        taken[each] += 1
        errors = [
            abs(n - Fraction(step * share, order.period)) for n, share in zip(taken, shares, strict=True)
        ]
        assert max(errors) <= bound


@given(SHARES, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_any_step_is_looked_up_alone(shares: list[int], steps: list[int]) -> None:
    together = SetOrder(shares).look_up(np.array(steps))
    for index, step in enumerate(steps):
        alone = SetOrder(shares).look_up(np.array([step]))
        assert [each[0] for each in alone] == [each[index] for each in together]


def test_a_long_period_is_computed_as_far_as_it_is_needed() -> None:
    shares = [700_000, 300_001, 48_575]
    tracemalloc.start()
    sets, _ = SetOrder(shares).look_up(np.arange(20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counts = Counter(sets.tolist())
    for each, share in enumerate(shares):
        assert abs(counts[each] - 20_000 * share / sum(shares)) <= 1
    assert peak < 8 * sum(shares) / 4  # a quarter of the whole period


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1], [1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([3, 1], [3, 1]),
        ([1e-3, 2e-3], [1, 2]),
        ([0.5, 0.25, 0.25], [2, 1, 1]),
        ([1, 0.0001], [10000, 1]),
        ([2.0, 2.0], [1, 1]),
        ([0.0, 0.3, 0.1], [0, 3, 1]),
    ],
)
def test_decimal_weights_are_exact(weights: list[float], shares: list[int]) -> None:
    assert whole_shares(weights) == shares


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8))
def test_other_weights_are_nearly_so(weights: list[float]) -> None:
    shares = whole_shares(weights)
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) < (len(weights) + 1) / 2**20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[TokenFile]:
    """72, 15 and 29 samples of LENGTH."""
    folders = [tmp_path_factory.mktemp("set") for _ in range(3)]
    return [token_file(folder, tokens) for folder, tokens in zip(folders, (500, 100, 200), strict=True)]


def blended(
    files: list[TokenFile], b: int = 2, m: int = 3, rank: int = 0, size: int = 1, **options: object
) -> StepLoader:
    order = SampleOrder(5, **{"weights": (0.5, 0.3, 0.2), **options})  # type: ignore[arg-type]
    return StepLoader(files, BatchShare(LENGTH, b, m, rank, size), order)


def test_every_set_has_its_own_shuffle_and_its_own_epochs(files: list[TokenFile]) -> None:
    order = SampleOrder(5, weights=(0.5, 0.3, 0.2))
    samples = BlendedSamples([PackedSamples(file, LENGTH) for file in files], order, 1)
    assert len(samples) == 72 + 15 + 29
    read = samples.read(np.arange(1000), pad_id=0)
    starts, sizes = (0, 72, 87), (72, 15, 29)
    sets = np.searchsorted(starts, read.sample_ids, side="right") - 1
    for each in range(3):
        ids = read.sample_ids[sets == each] - starts[each]
        assert abs(len(ids) - 1000 * (0.5, 0.3, 0.2)[each]) <= 1
        epochs = [ids[start : start + sizes[each]].tolist() for start in range(0, len(ids), sizes[each])]
        whole = [epoch for epoch in epochs if len(epoch) == sizes[each]]
        assert len(whole) > 5 and all(sorted(epoch) == list(range(sizes[each])) for epoch in whole)
        assert len(set(map(tuple, whole))) == len(whole)
        # The text is that of the set: ids count up from 1, LENGTH a sample.
        assert (read.input_ids[sets == each, 0] == ids * LENGTH + 1).all()


def test_one_set_is_as_without_a_blend(files: list[TokenFile]) -> None:
    alone = StepLoader(files[0], BatchShare(LENGTH, 6, 1), SampleOrder(5))
    weighted = blended(files[:1], b=6, m=1, weights=(0.3,))
    for consumed in (0, 60, 600):
        assert rows(weighted.step_batch(consumed)) == rows(alone.step_batch(consumed))
    assert alone.step_batch(0).sample_ids.tolist() == Sampler(72, 5).sample_ids(np.arange(6)).tolist()


@given(st.sampled_from([(12, 1, 1), (2, 3, 2), (1, 3, 4), (2, 1, 6), (1, 1, 12)]), st.integers(0, 4000))
def test_any_layout_sees_the_same_samples(
    files: list[TokenFile], split: tuple[int, int, int], consumed: int
) -> None:
    b, m, size = split
    whole = rows(blended(files, b=12, m=1).step_batch(consumed))
    ranks = [rows(blended(files, b, m, rank, size).step_batch(consumed)) for rank in range(size)]
    assert [row for micro in range(m) for rank in ranks for row in rank[micro * b : micro * b + b]] == whole


def test_an_epoch_is_as_long_as_all_sets_together(files: list[TokenFile]) -> None:
    each = blended(files, epochs=0.5)
    assert each.samples_per_epoch == 116
    assert each.steps_for_epochs(0.5) == 10
    assert int((each.step_batch(54).labels >= 0).any(dim=1).sum()) == 58 - 54


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5, 0.0), (1, 1, -1)])
def test_weights_that_do_not_fit_are_refused(files: list[TokenFile], weights: tuple[float, ...]) -> None:
    with pytest.raises(
        DataError, match=r"3 token files have the weights .*; give each one above 0 \(data\.blend\)"
    ):
        blended(files, weights=weights)


CHANGES = st.lists(
    st.tuples(st.integers(1, 400), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)),
    min_size=1,
    max_size=4,
)


@given(CHANGES)
def test_every_set_goes_on_where_it_stopped_when_the_weights_change(
    changes: list[tuple[int, list[int]]],
) -> None:
    firsts = [0, *np.cumsum([length for length, _ in changes]).tolist()]
    weights = [[2, 1, 1], *(each for _, each in changes)]
    order = ChangingOrder([WeightChange(*each) for each in zip(firsts, weights, strict=True)])
    places = np.arange(firsts[-1] + 300)
    sets, turns = order.look_up(places)
    taken = [0, 0, 0]
    for each, turn in zip(sets.tolist(), turns.tolist(), strict=True):
        assert turn == taken[each]
        taken[each] += 1
    for first, end, shares in zip(firsts, [*firsts[1:], len(places)], weights, strict=True):
        counts = np.bincount(sets[first:end], minlength=3)
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (end - first) * Fraction(share, sum(shares))) < 1
    alone = [order.look_up(np.array([place])) for place in (firsts[-1] - 1, firsts[-1], len(places) - 1)]
    assert [(int(each[0]), int(turn[0])) for each, turn in alone] == [
        (sets[place], turns[place]) for place in (firsts[-1] - 1, firsts[-1], len(places) - 1)
    ]


def test_a_curriculum_repeats_and_loses_no_sample_in_any_layout(files: list[TokenFile]) -> None:
    """Steps of 12 samples; set 1 pauses from step 4 on and comes back in step 7."""
    steps, curriculum = 9, [(4, (0.5, 0.0, 0.5)), (7, (0.0, 1.0, 0.0))]
    whole = blended(files, b=12, m=1, curriculum=curriculum)
    read = [whole.step_batch(12 * step) for step in range(steps)]
    starts, sizes = (0, 72, 87), (72, 15, 29)
    for each, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        ids = [i - start for batch in read for i in batch.sample_ids.tolist() if start <= i < start + size]
        sampler = Sampler(size, seed_of_set(5, each))
        assert ids == sampler.sample_ids(np.arange(len(ids))).tolist()
    in_step = [Counter(int(np.searchsorted(starts, i, side="right")) - 1 for i in b.sample_ids) for b in read]
    assert in_step[0] == blend_counts(6, 4, 2) and sum(in_step[3:6], Counter()) == blend_counts(18, 0, 18)
    assert all(counts == Counter({1: 12}) for counts in in_step[6:])
    for rank in range(2):
        share = blended(files, b=2, m=3, rank=rank, size=2, curriculum=curriculum)
        for step in (8, 3, 5):  # resumed anywhere
            mine = [m * 4 + rank * 2 + i for m in range(3) for i in range(2)]
            expected = [read[step].sample_ids.tolist()[row] for row in mine]
            assert share.step_batch(12 * step).sample_ids.tolist() == expected


def blend_counts(*counts: int) -> Counter[int]:
    return Counter({each: count for each, count in enumerate(counts) if count})


def test_the_later_weights_have_to_fit_too(files: list[TokenFile]) -> None:
    for weights in ((0.5, 0.5), (0, 0, 0), (1, 1, -1)):
        with pytest.raises(DataError, match=r"3 token files have .* \(data\.curriculum\)"):
            blended(files, curriculum=[(2, weights)])
