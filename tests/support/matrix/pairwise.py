"""Covering arrays of strength two: few rows that contain every pair of values that a legal row can have.

Greedy, one row at a time (Cohen et al., "The AETG system", 1997), by newly covered pairs per cost; deterministic.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count

Row = dict[str, str]
Cell = tuple[str, str]
Pair = frozenset[Cell]
Rule = Callable[[Mapping[str, str]], str | None]

# Attempts per row, each with another order of the axes; the best row is taken.
ATTEMPTS = 6


@dataclass(frozen=True)
class Covering:
    """The rows, and the impossible pairs with the reason."""

    rows: list[Row] = field(default_factory=list)
    impossible: dict[Pair, str] = field(default_factory=dict)


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    return map(frozenset, combinations(row.items(), 2))


def every_pair(axes: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Return each pair of values of different axes, in the order of the axes."""
    return [
        frozenset([(one, value), (other, with_value)])
        for one, other in combinations(axes, 2)
        for value in axes[one]
        for with_value in axes[other]
    ]


def cover(
    axes: Mapping[str, Sequence[str]], illegal: Rule, cost: Callable[[Row], float], later: Sequence[str] = ()
) -> Covering:
    """Return legal rows over the axes that contain every pair that a legal row can have.

    axes: name -> values; of two values that cover equally much, the earlier one is taken.
    illegal: partial or complete row -> why it is illegal; must reject every illegal complete row, but may accept a
        partial row that cannot be completed.
    later: axes that join one by one (Lei and Tai, "In-parameter-order", 1998): the rows over the axes
        before them, legal with the new one's first value, stay; each gets the value that covers most, and few rows
        follow. No pair that these rows cannot have may become legal by another value of it.
    """
    covering, search = Covering(), _Search(axes, illegal)
    if later:
        *sooner, last = later
        plain = {last: axes[last][0]}
        others = {name: values for name, values in axes.items() if name != last}
        before = cover(others, lambda row: illegal({**row, **plain}), cost, sooner)
        covering.impossible.update(before.impossible)
        search.settle(list(before.impossible))
        for row in before.rows:
            longer = [{axis: {**row, last: value}[axis] for axis in axes} for value in axes[last]]
            legal = [each for each in longer if illegal(each) is None]
            covering.rows.append(max(legal, key=lambda each: search.gain(each) / cost(each)))
            search.settle(pairs_of(covering.rows[-1]))
    _complete(covering, search, cost)
    return covering


def _complete(covering: Covering, search: "_Search", cost: Callable[[Row], float]) -> None:
    """Add rows until every pair is covered, or known to be impossible."""
    shuffled = random.Random(0)
    while search.uncovered:
        seed = next(iter(search.uncovered))
        best: Row | None = None
        for attempt in range(ATTEMPTS):
            order = list(search.axes)
            if attempt:
                shuffled.shuffle(order)
            row = search.completed(seed, order)
            if row is None:
                covering.impossible[seed] = search.reason
                break
            if best is None or search.gain(row) / cost(row) > search.gain(best) / cost(best):
                best = row
        if best is None:
            search.settle([seed])
        else:
            covering.rows.append({axis: best[axis] for axis in search.axes})
            search.settle(pairs_of(best))


def uncoverable(pairs: Sequence[Pair], axes: Mapping[str, Sequence[str]], illegal: Rule) -> dict[Pair, str]:
    """Return the pairs that no legal row has, with the reason."""
    search = _Search(axes, illegal)
    return {pair: search.reason for pair in pairs if search.completed(pair, list(axes)) is None}


class _TooManyDeadEnds(Exception):
    """A dead end of the search; another order of the axes may succeed."""


class _Search:
    """The pairs still to cover, and the search for rows that cover many of them."""

    def __init__(self, axes: Mapping[str, Sequence[str]], illegal: Rule):
        self.axes, self._rule = axes, illegal
        self.uncovered: dict[Pair, None] = dict.fromkeys(every_pair(axes))
        self._left = Counter(cell for pair in self.uncovered for cell in pair)
        self._known: dict[frozenset[Cell], str | None] = {}
        self._dead_ends: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._patience = 0
        self.reason = ""

    def settle(self, pairs: Iterator[Pair] | Sequence[Pair]) -> None:
        for pair in pairs:
            if pair in self.uncovered:
                del self.uncovered[pair]
                self._left.subtract(pair)

    def gain(self, row: Row) -> int:
        return sum(pair in self.uncovered for pair in pairs_of(row))

    def completed(self, seed: Pair, order: Sequence[str]) -> Row | None:
        """Return a legal row with the pair, or None and set `reason` if there is none.

        Axes that caused dead ends are filled in first, so that contradictions show early; after several dead ends the
        search restarts with the new weights (Boussemart et al. 2004, weighted degree).
        """
        if (reason := self._illegal(dict(sorted(seed)))) is not None:
            self.reason = reason
            return None
        for patience in count(4):
            self._reasons.clear()
            in_order = sorted(order, key=lambda axis: -self._dead_ends[axis].bit_length())
            self._patience = 2**patience
            try:
                row = self._complete(dict(sorted(seed)), in_order)
            except _TooManyDeadEnds:
                continue
            if row is None:
                self.reason = " | ".join(reason for reason, _ in self._reasons.most_common(3))
            return row
        raise AssertionError

    def _complete(self, row: Row, order: Sequence[str]) -> Row | None:
        if len(row) == len(self.axes):
            return row
        axis = next(axis for axis in order if axis not in row)
        any_fits = False
        for value in self._by_gain(row, axis):
            longer = {**row, axis: value}
            if (reason := self._illegal(longer)) is not None:
                self._reasons[reason] += 1
                continue
            any_fits = True
            if (whole := self._complete(longer, order)) is not None:
                return whole
        if not any_fits:
            self._dead_ends[axis] += 1
            self._patience -= 1
            if not self._patience:
                raise _TooManyDeadEnds
        return None

    def _by_gain(self, row: Row, axis: str) -> list[str]:
        def worth(value: str) -> tuple[int, int]:
            new = sum(frozenset([(axis, value), cell]) in self.uncovered for cell in row.items())
            return new, self._left[axis, value]

        return sorted(self.axes[axis], key=worth, reverse=True)

    def _illegal(self, row: Row) -> str | None:
        cells = frozenset(row.items())
        if cells not in self._known:
            self._known[cells] = self._rule(row)
        return self._known[cells]
