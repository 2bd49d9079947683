"""Packing of documents into rows: against the definition of each strategy, written out."""

import numpy as np
import pytest
from numpy.typing import NDArray

from megalite.data.batches.bin_packing import Strategy, fill, pack


def by_definition(lengths: list[int], capacity: int, strategy: str, order: list[int]) -> list[list[int]]:
    """Try every row for every document."""
    room: list[int] = []
    rows: list[list[int]] = []
    for document in order:
        fitting = [row for row, left in enumerate(room) if left >= lengths[document]]
        if strategy == "greedy":
            fitting = [row for row in fitting if row == len(rows) - 1]
        if strategy == "none" or not fitting:
            room.append(capacity)
            rows.append([])
            row = len(rows) - 1
        elif strategy == "best_fit":
            row = min(fitting, key=lambda each: (room[each], each))
        else:
            row = fitting[0]
        room[row] -= lengths[document]
        rows[row].append(document)
    return rows


def longest_first(lengths: NDArray[np.int64], seed: int) -> list[int]:
    drawn = np.random.PCG64(seed).random_raw(len(lengths))
    return sorted(range(len(lengths)), key=lambda each: (-lengths[each], drawn[each]))


@pytest.mark.parametrize("strategy", ["greedy", "first_fit", "best_fit", "none"])
def test_rows_are_those_of_the_definition(strategy: Strategy) -> None:
    draw = np.random.default_rng()
    for _ in range(100):
        capacity, count, seed = (int(draw.integers(low, high)) for low, high in ((1, 70), (0, 80), (0, 99)))
        lengths = draw.integers(1, capacity + 1, count)
        packed = pack(lengths, capacity, strategy, seed)
        order = longest_first(lengths, seed) if strategy.endswith("fit") else list(range(count))
        expected = by_definition(lengths.tolist(), capacity, strategy, order)
        assert [packed.row(row).tolist() for row in range(len(packed))] == expected, (capacity, lengths)
        if count:
            assert fill(lengths, packed, capacity) == lengths.sum() / (capacity * len(expected))


def test_the_seed_decides_between_documents_of_one_length() -> None:
    lengths = np.full(40, 5)
    first, same, other = (pack(lengths, 16, "best_fit", seed).documents.tolist() for seed in (1, 1, 2))
    assert first == same != other and sorted(first) == sorted(other)


def test_rows_stay_as_they_are_from_version_to_version() -> None:
    packed = pack(np.array([4, 4, 4, 2, 2, 2, 1]), 7, "best_fit", 1)
    assert [packed.row(row).tolist() for row in range(len(packed))] == [[2, 4, 6], [0, 5], [1, 3]]


@pytest.mark.parametrize("wrong", [0, 9])
def test_a_length_that_no_row_holds_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="not from 1 to 8"):
        pack(np.array([3, wrong]), 8, "best_fit", 0)


def test_lengths_as_of_real_conversations_fill_the_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 5000).astype(np.int64).clip(1, 2048)
    assert fill(lengths, pack(lengths, 2048, "best_fit", 0), 2048) >= 0.98
    assert fill(lengths, pack(lengths, 2048, "none", 0), 2048) < 0.12
