"""Finds ranks that are slower than the ranks with equal work, by the time of each rank's own work in a step."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

# A rank is slow if it was so in the median of its last reports; the first ones of a start have its warm-up.
_REPORTS, _WARM_UP = 5, 2
# Shorter reports count together: a rank whose core another program takes for a moment is not slow.
_LEAST_SECONDS = 1.0
_SLOW, _RECOVERED = 1.5, 1.25
# A rank that costs the others less than this share of a step is not worth a line.
_SHARE = 0.1


class SlowRank(NamedTuple):
    """A rank, the median seconds of its own work in a step, and the seconds that were to be expected."""

    rank: int
    seconds: float
    peers_seconds: float

    @property
    def factor(self) -> float:
        return self.seconds / self.peers_seconds


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values but one; a sort for each of thousands of ranks would take seconds."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    low, high = (ordered[index + (index >= place)] for index in ((left - 1) // 2, left // 2))
    return (low + high) / 2


def _mean_of(reports: Sequence[tuple[int, Sequence[float]]]) -> Sequence[float]:
    """Return the seconds of each rank in a step, of reports of several steps each."""
    if len(reports) == 1:
        return reports[0][1]
    steps, work = zip(*reports, strict=True)
    return [fmean(seconds, steps) for seconds in zip(*work, strict=True)]


class SlowRanks:
    """Compares the work of each rank with the median of its peers' over the last five reports of at least a second.

    A rank without a peer, as each stage of a pipeline alone, is compared with its own first five reports, and with more
    where the median of the other ranks takes longer than in theirs. Slow: half as long again as expected, and a tenth
    of the step longer; no longer slow: within a quarter of it.
    """

    def __init__(self, peers: Sequence[Sequence[int]]):
        """peers: the groups of ranks with equal work, such as those of a stage."""
        self._peers = [tuple(group) for group in peers if len(group) > 1]
        self.alone = not self._peers
        """Whether no rank has a peer."""
        self._first: Sequence[float] = ()
        self._short: list[tuple[int, Sequence[float]]] = []
        self._lasted = 0.0
        self._reports = deque[Sequence[float]](maxlen=_REPORTS)
        self._seen = 0
        self.slow: dict[int, SlowRank] = {}
        """The ranks that are slow now."""

    def update(
        self, work: Sequence[float], step_seconds: float, steps: int = 1
    ) -> tuple[list[SlowRank], list[int]]:
        """Add a report of some steps; return the ranks that have become slow, and those that are no longer.

        work: the seconds of each rank's own work in a step. step_seconds: of a whole step.
        """
        self._short.append((steps, work))
        self._lasted += steps * step_seconds
        if self._lasted < _LEAST_SECONDS:
            return [], []
        self._seen += 1
        if self._seen > _WARM_UP:
            self._reports.append(_mean_of(self._short))
        step_seconds = self._lasted / sum(count for count, _ in self._short)
        self._short, self._lasted = [], 0.0
        if len(self._reports) < _REPORTS:
            return [], []
        usual = [median(seconds) for seconds in zip(*self._reports, strict=True)]
        self._first = self._first or usual
        began, ended = list[SlowRank](), list[int]()
        for now in self._expected_of_peers(usual) if self._peers else self._expected_since_start(usual):
            rank, peers = now.rank, now.peers_seconds
            if not peers:  # the waits that a device reports late fill their steps
                continue
            if rank in self.slow and now.seconds <= _RECOVERED * peers:
                del self.slow[rank]
                ended.append(rank)
            elif rank in self.slow:
                self.slow[rank] = now
            elif now.seconds > max(_SLOW * peers, peers + _SHARE * step_seconds):
                self.slow[rank] = now
                began.append(now)
        return began, ended

    def _expected_of_peers(self, usual: Sequence[float]) -> Iterator[SlowRank]:
        for group in self._peers:
            ordered = sorted(usual[rank] for rank in group)
            for rank in group:
                yield SlowRank(rank, usual[rank], _median_without(ordered, usual[rank]))

    def _expected_since_start(self, usual: Sequence[float]) -> Iterator[SlowRank]:
        if len(usual) < 2 or not all(self._first):
            return
        changes = [now / first for now, first in zip(usual, self._first, strict=True)]
        ordered = sorted(changes)
        for rank, seconds in enumerate(usual):
            longer = max(1.0, _median_without(ordered, changes[rank]))
            yield SlowRank(rank, seconds, self._first[rank] * longer)
