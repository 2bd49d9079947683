"""Packs documents of known lengths into rows of a fixed capacity, without cutting any."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Strategy = Literal["greedy", "first_fit", "best_fit", "none"]


@dataclass(frozen=True)
class Bins:
    """Rows of documents: their indices, row after row; starts: [rows + 1], where each row begins in `documents`."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """Return the documents of a row, in their order."""
        return self.documents[self.starts[index] : self.starts[index + 1]]


def pack(lengths: NDArray[np.int64], capacity: int, strategy: Strategy, seed: int) -> Bins:
    """Assign every document to one row.

    "none": one a row. "greedy": a row ends where the next document does not fit. "first_fit", "best_fit": longest first
    (Johnson, "Near-optimal bin packing algorithms", 1973), into the first row with room, or that with the least
    sufficient room; documents of one length come in an order drawn from `seed`.
    lengths: [documents], 1 to `capacity` each. Raises ValueError for others.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}, not from 1 to {capacity}")
    order = np.arange(len(lengths))
    if strategy == "none":
        return _bins(order, order)
    if strategy == "greedy":
        return _bins(order, _greedy(lengths.tolist(), capacity))
    # Raw bits, which every version of numpy draws alike: a resumed run has the same rows.
    order = np.lexsort((np.random.PCG64(seed).random_raw(len(lengths)), -lengths))
    fit = _first_fit if strategy == "first_fit" else _best_fit
    return _bins(order, fit(lengths[order].tolist(), capacity))


def fill(lengths: NDArray[np.int64], bins: Bins, capacity: int) -> float:
    """Return the share of all positions that a document fills; 1.0 without rows."""
    return float(lengths.sum() / (len(bins) * capacity)) if len(bins) else 1.0


def _bins(documents: NDArray[np.int64], rows: NDArray[np.int64]) -> Bins:
    """Return the bins of documents whose rows are given, in the order in which they were placed."""
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows) if len(rows) else np.zeros(0, dtype=np.int64)
    return Bins(documents[order], np.concatenate([[0], np.cumsum(counts)]))


def _greedy(lengths: list[int], capacity: int) -> NDArray[np.int64]:
    def rows() -> Iterator[int]:
        row, room = 0, capacity
        for length in lengths:
            if length > room:
                row, room = row + 1, capacity
            room -= length
            yield row

    return np.fromiter(rows(), dtype=np.int64, count=len(lengths))


def _first_fit(lengths: list[int], capacity: int) -> NDArray[np.int64]:
    """Descend a tree whose nodes hold the most room of the rows below them."""
    leaves = 1 << max(1, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows = np.empty(len(lengths), dtype=np.int64)
    for place, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < length
        rows[place] = node - leaves
        most = room[node] - length
        while room[node] != most:
            room[node] = most
            node //= 2
            if not node:
                break
            most = max(room[2 * node], room[2 * node + 1])
    return rows


def _best_fit(lengths: list[int], capacity: int) -> NDArray[np.int64]:
    """Keep the rows of each room, the lowest first, and the rooms that have rows as bits of an integer."""
    rows_of: list[list[int]] = [[] for _ in range(capacity + 1)]
    rows, opened, rooms = np.empty(len(lengths), dtype=np.int64), 0, 0
    for place, length in enumerate(lengths):
        sufficient = rooms >> length
        if sufficient:
            room = length + (sufficient & -sufficient).bit_length() - 1
            row = heapq.heappop(rows_of[room])
            if not rows_of[room]:
                rooms ^= 1 << room
        else:
            row, room, opened = opened, capacity, opened + 1
        rows[place] = row
        left = room - length
        if left:
            heapq.heappush(rows_of[left], row)
            rooms |= 1 << left
    return rows
