"""Blended data sets: samples of several token files in proportion to their weights."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from megalite.data.batches.packing import Samples
from megalite.data.batches.sampler import Sampler
from megalite.errors import DataError

# Upper bound on the sum of the integer shares, after which the order of the sets repeats.
_LONGEST_PERIOD = 1 << 20
_FIRST_STEPS = 1 << 12


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return integers in the ratio of the weights: exact if their sum is at most 2**20, else rounded.

    A weight above 0 gets a share of at least 1, a weight of 0 the share 0.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    period = lcm(*((weight / total).denominator for weight in exact))
    if period <= _LONGEST_PERIOD:
        return [int(weight / total * period) for weight in exact]
    quotas = [weight / total * _LONGEST_PERIOD for weight in exact]
    shares = [max(1, int(quota)) if quota else 0 for quota in quotas]
    # The largest-remainder method; a share that was raised to 1 has no remainder.
    order = sorted(range(len(quotas)), key=lambda index: shares[index] - quotas[index])
    for index in order[: max(0, _LONGEST_PERIOD - sum(shares))]:
        shares[index] += 1
    return shares


class SetOrder:
    """The data set of each step of an endless sequence; set i gets shares[i] of `period` = sum(shares) steps.

    After any number of steps every set is within one step of its share: Tijdeman, "The chairman assignment problem",
    1980, with the bound 1 - 1 / (2 sets - 2). The bound gives each turn of a set a first and a last step; among the
    turns that may come now, the one with the earliest last step is taken. At most one period is computed. A set with
    the share 0 has no turn.
    """

    def __init__(self, shares: Sequence[int]):
        self.shares = np.array(shares, dtype=np.int64)
        self.period = sum(shares)
        self._sets = np.zeros(0, dtype=np.int64)
        self._turns = np.zeros(0, dtype=np.int64)
        self._computing = Lock()  # the loader threads look up concurrently
        present = [number for number, share in enumerate(shares) if share]
        self._scale = max(1, 2 * len(present) - 2)
        self._taken = [0] * len(shares)
        self._waiting: list[tuple[int, int]] = []
        self._due: list[tuple[int, int]] = []
        for number in present:
            self._enter(number)

    def look_up(self, steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each step its set, and how many earlier steps had the same set: [steps] int64 each."""
        periods, places = np.divmod(steps, self.period)
        with self._computing:
            self._compute(int(places.max(initial=0)) + 1)
            sets = self._sets[places]
            turns = self._turns[places]
        return sets, periods * self.shares[sets] + turns

    def taken(self, steps: int) -> NDArray[np.int64]:
        """Return how many of the first `steps` steps each set has: [sets] int64."""
        periods, rest = divmod(steps, self.period)
        with self._computing:
            self._compute(rest)
            counts = np.bincount(self._sets[:rest], minlength=len(self.shares))
        return periods * self.shares + counts

    def _enter(self, number: int) -> None:
        """Queue the next turn of a set under the first step that the bound allows."""
        share, turn = int(self.shares[number]), self._taken[number]
        first = -(-((turn * self._scale + 1) * self.period) // (self._scale * share))
        heapq.heappush(self._waiting, (first, number))

    def _compute(self, steps: int) -> None:
        start = len(self._sets)
        if steps <= start:
            return
        stop = min(self.period, max(steps, 2 * start, _FIRST_STEPS))
        sets, turns = [], []
        for step in range(start + 1, stop + 1):
            while self._waiting and self._waiting[0][0] <= step:
                _, number = heapq.heappop(self._waiting)
                share, turn = int(self.shares[number]), self._taken[number]
                last = ((turn + 1) * self._scale - 1) * self.period // (self._scale * share)
                heapq.heappush(self._due, (last, number))
            _, number = heapq.heappop(self._due)
            sets.append(number)
            turns.append(self._taken[number])
            self._taken[number] += 1
            self._enter(number)
        self._sets = np.concatenate([self._sets, np.array(sets, dtype=np.int64)])
        self._turns = np.concatenate([self._turns, np.array(turns, dtype=np.int64)])


@dataclass(frozen=True)
class WeightChange:
    """From place `first` of the training order on, counted from 0, the sets have these weights."""

    first: int
    weights: Sequence[float]


class ChangingOrder:
    """A SetOrder whose shares change at given places; every set goes on with its next turn.

    changes: by rising places, the first at 0. The place alone says the set and its turn, so any place can be looked up.
    """

    def __init__(self, changes: Sequence[WeightChange]):
        self._orders = [SetOrder(whole_shares(change.weights)) for change in changes]
        self._firsts = np.array([change.first for change in changes], dtype=np.int64)
        lengths = np.diff(self._firsts).tolist()
        before = [np.zeros_like(self._orders[0].shares)]
        for order, length in zip(self._orders, lengths, strict=False):
            before.append(before[-1] + order.taken(length))
        self._turns_before = np.stack(before)

    def look_up(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each place its set, and how many earlier places had the same set: [places] int64 each."""
        numbers = np.searchsorted(self._firsts, places, side="right") - 1
        sets, turns = np.empty_like(places), np.empty_like(places)
        for number in np.unique(numbers):
            chosen = numbers == number
            sets[chosen], turns[chosen] = self._orders[number].look_up(places[chosen] - self._firsts[number])
            turns[chosen] += self._turns_before[number, sets[chosen]]
        return sets, turns


@dataclass(frozen=True)
class SampleOrder:
    """The order in which the samples of one or more token files are read.

    Each file is shuffled with a seed of its own and has its own epochs.
    weights: the share of each token file.
    curriculum: (step, weights): the weights from this step on, counted from 1; every file goes on where it stopped.
    epochs: the end of the data; None: no end.
    together: how many consecutive samples of a file stay side by side, as the two answers of a pair; divides their
        number and the micro batch.
    """

    seed: int
    shuffle: bool = True
    weights: Sequence[float] = (1.0,)
    curriculum: Sequence[tuple[int, Sequence[float]]] = ()
    epochs: float | Fraction | None = None
    together: int = 1


@dataclass(frozen=True)
class BatchRows:
    """Samples as rows of a batch.

    input_ids, labels: [rows, S]. sample_ids: [rows], counted over all sets end to end, the same in every epoch.
    begins, lengths: as of SampleRows; without lengths there is no padding.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None
    lengths: NDArray[np.int64] | None = None


class BlendedSamples:
    """The samples of one or more token files in the order of training; `len` counts the samples of all files.

    step_samples: the samples of a step, by which a curriculum counts.
    Raises DataError unless the weights fit the files.
    """

    def __init__(self, samples: Sequence[Samples], order: SampleOrder, step_samples: int):
        phases = [(1, order.weights), *order.curriculum]
        for _, weights in phases:
            _check_weights(weights, len(samples), later=len(phases) > 1)
        self._samples, self._together = samples, order.together
        sizes = [len(file_samples) for file_samples in samples]
        self._first_ids = np.cumsum([0, *sizes[:-1]])
        self._order = ChangingOrder(
            [WeightChange((step - 1) * step_samples // order.together, weights) for step, weights in phases]
        )
        seeds = [seed_of_set(order.seed, index) for index in range(len(sizes))]
        self._samplers = [
            Sampler(size // order.together, seed, order.shuffle)
            for size, seed in zip(sizes, seeds if len(sizes) > 1 else [order.seed], strict=True)
        ]

    def __len__(self) -> int:
        return sum(map(len, self._samples))

    def read(self, places: NDArray[np.int64], pad_id: int) -> BatchRows:
        """Return the samples at these places of the training order; `pad_id` fills up short ones."""
        groups, members = np.divmod(places, self._together)
        sets, turns = self._order.look_up(groups)
        length = self._samples[0].sequence_length
        input_ids = np.empty((len(places), length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        sample_ids, lengths = np.empty_like(places), np.empty_like(places)
        begins: NDArray[np.bool_] | None = None
        for number in np.unique(sets):
            rows = sets == number
            ids = self._samplers[number].sample_ids(turns[rows]) * self._together + members[rows]
            samples = self._samples[number].read(ids, pad_id)
            input_ids[rows], labels[rows], file_begins, lengths[rows] = samples
            if file_begins is not None:
                begins = np.zeros(input_ids.shape, dtype=bool) if begins is None else begins
                begins[rows] = file_begins
            sample_ids[rows] = ids + self._first_ids[number]
        return BatchRows(input_ids, labels, sample_ids, begins, lengths)


def _check_weights(weights: Sequence[float], files: int, *, later: bool) -> None:
    """Raise DataError unless every file has a weight above 0; `later`: the weights change, and may be 0 for a while."""
    least = min(weights, default=0)
    if len(weights) != files or least < 0 or not any(weights) or (least == 0 and not later):
        asked = (
            "give each one 0 or more, and one above 0 (data.curriculum)" if later else "give each one above 0"
        )
        blend = "" if later else " (data.blend)"
        raise DataError(f"{files} token files have the weights {list(weights)}; {asked}{blend}")


def seed_of_set(seed: int, index: int) -> int:
    """Return the seed of one of several sets, so that their orders are independent."""
    digest = hashlib.blake2b(f"{seed}:blend:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
