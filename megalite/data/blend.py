"""Blended data sets: samples of several token files in proportion to their weights."""

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from megalite.data.packing import PackedSamples, Samples
from megalite.data.sampler import Sampler
from megalite.data.token_file import TokenFile
from megalite.errors import DataError

# Upper bound on the sum of the integer shares, after which the order of the sets repeats.
_LONGEST_PERIOD = 1 << 20
_FIRST_STEPS = 1 << 12


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return integers in the ratio of the weights: exact if their sum is at most 2**20, else rounded, at least 1."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    period = lcm(*((weight / total).denominator for weight in exact))
    if period <= _LONGEST_PERIOD:
        return [int(weight / total * period) for weight in exact]
    quotas = [weight / total * _LONGEST_PERIOD for weight in exact]
    shares = [max(1, int(quota)) for quota in quotas]
    # The largest-remainder method; a share that was raised to 1 has no remainder.
    order = sorted(range(len(quotas)), key=lambda index: shares[index] - quotas[index])
    for index in order[: max(0, _LONGEST_PERIOD - sum(shares))]:
        shares[index] += 1
    return shares


class SetOrder:
    """The data set of each step of an endless sequence; set i gets shares[i] of `period` = sum(shares) steps.

    After any number of steps every set is within one step of its share: Tijdeman, "The chairman assignment problem",
    1980, with the bound 1 - 1 / (2 sets - 2). The bound gives each turn of a set a first and a last step; among the
    turns that may come now, the one with the earliest last step is taken. At most one period is computed.
    """

    def __init__(self, shares: Sequence[int]):
        self.shares = np.array(shares, dtype=np.int64)
        self.period = sum(shares)
        self._sets = np.zeros(0, dtype=np.int64)
        self._turns = np.zeros(0, dtype=np.int64)
        self._computing = Lock()  # the loader threads look up concurrently
        self._scale = max(1, 2 * len(shares) - 2)
        self._taken = [0] * len(shares)
        self._waiting: list[tuple[int, int]] = []
        self._due: list[tuple[int, int]] = []
        for each in range(len(shares)):
            self._enter(each)

    def look_up(self, steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each step its set, and how many earlier steps had the same set: [steps] int64 each."""
        periods, places = np.divmod(steps, self.period)
        with self._computing:
            self._compute(int(places.max(initial=0)) + 1)
            sets = self._sets[places]
            turns = self._turns[places]
        return sets, periods * self.shares[sets] + turns

    def _enter(self, each: int) -> None:
        """Queue the next turn of a set under the first step that the bound allows."""
        share, turn = int(self.shares[each]), self._taken[each]
        first = -(-((turn * self._scale + 1) * self.period) // (self._scale * share))
        heapq.heappush(self._waiting, (first, each))

    def _compute(self, steps: int) -> None:
        start = len(self._sets)
        if steps <= start:
            return
        stop = min(self.period, max(steps, 2 * start, _FIRST_STEPS))
        sets, turns = [], []
        for step in range(start + 1, stop + 1):
            while self._waiting and self._waiting[0][0] <= step:
                _, each = heapq.heappop(self._waiting)
                share, turn = int(self.shares[each]), self._taken[each]
                last = ((turn + 1) * self._scale - 1) * self.period // (self._scale * share)
                heapq.heappush(self._due, (last, each))
            _, each = heapq.heappop(self._due)
            sets.append(each)
            turns.append(self._taken[each])
            self._taken[each] += 1
            self._enter(each)
        self._sets = np.concatenate([self._sets, np.array(sets, dtype=np.int64)])
        self._turns = np.concatenate([self._turns, np.array(turns, dtype=np.int64)])


@dataclass(frozen=True)
class Rows:
    """Samples as rows of a batch.

    input_ids, labels: [rows, S]. sample_ids: [rows], counted over all sets end to end, the same in every epoch.
    sets: [rows], the index of the data set. begins: as of SampleRows.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    sets: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None


class BlendedSamples:
    """The samples of one or more token files in training order; `len` counts the samples of all files.

    Each file is shuffled with its own seed and has its own epochs. samples_of: makes the samples of a file.
    """

    def __init__(
        self,
        token_files: Sequence[TokenFile],
        weights: Sequence[float],
        sequence_length: int,
        *,
        seed: int,
        shuffle: bool,
        samples_of: Callable[[TokenFile, int], Samples] = PackedSamples,
    ):
        if len(token_files) != len(weights) or not weights or min(weights) <= 0:
            raise DataError(
                f"{len(token_files)} token files have the weights {list(weights)}; give each one above 0 (data.blend)"
            )
        self.token_files = tuple(token_files)
        self._samples = [samples_of(file, sequence_length) for file in token_files]
        sizes = [len(each) for each in self._samples]
        self._first_ids = np.cumsum([0, *sizes[:-1]])
        self._order = SetOrder(whole_shares(weights))
        seeds = [seed] if len(sizes) == 1 else [_seed(seed, index) for index in range(len(sizes))]
        self._samplers = [Sampler(size, each, shuffle) for size, each in zip(sizes, seeds, strict=True)]

    def __len__(self) -> int:
        return sum(map(len, self._samples))

    def read(self, places: NDArray[np.int64], pad_id: int) -> Rows:
        """Return the samples at these places of the training order; `pad_id` fills up short ones."""
        sets, turns = self._order.look_up(places)
        length = self._samples[0].sequence_length
        input_ids = np.empty((len(places), length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        sample_ids = np.empty_like(places)
        begins: NDArray[np.bool_] | None = None
        for each in np.unique(sets):
            rows = sets == each
            ids = self._samplers[each].sample_ids(turns[rows])
            input_ids[rows], labels[rows], found = self._samples[each].read(ids, pad_id)
            if found is not None:
                begins = np.zeros(input_ids.shape, dtype=bool) if begins is None else begins
                begins[rows] = found
            sample_ids[rows] = ids + self._first_ids[each]
        return Rows(input_ids, labels, sample_ids, sets, begins)


def _seed(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:blend:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
