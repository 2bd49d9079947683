"""How two tensors differ, from blocks of their elements: which, by how much, whether one is the other rounded."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Copies of this many elements, in float64 and int64, stay in a processor's cache.
_PIECE = 1 << 16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of B differs from that of A.

    dtypes: of A and B. differing: how many elements differ; NaN equals NaN, -0 equals 0. max_absolute: the largest
    difference; inf where one is not finite. relative: the same over the largest finite magnitude of A. norm: the norm
    of the differences over that of A. ulp: the largest difference in units in the last place; None for two dtypes.
    first: the index of the first element that differs, and its values in A and B. both_nan: elements that are NaN in
    both. rounded: "A" or "B", which is the other rounded to its own dtype, each element exactly. reordered: whether
    both have the same values in another order.
    """

    state: str
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    differing: int
    max_absolute: float
    relative: float
    norm: float
    ulp: float | None
    first: tuple[int, ...] | None
    first_values: tuple[float, float] | None
    both_nan: int
    rounded: str | None
    reordered: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {**vars(self), "elements": math.prod(self.shape)}


class TensorComparison:
    """Compares two tensors of one shape, whose elements come in row-major order, some at a time."""

    def __init__(self, shape: tuple[int, ...]):
        self._shape, self._reached = shape, 0
        self._dtypes = ("", "")
        self._differing = self._both_nan = 0
        self._max_absolute = self._largest = self._squares = self._squares_of_a = self._ulp = 0.0
        self._first: tuple[int, float, float] | None = None
        self._rounded: str | None = None
        self._all_rounded = self._all_hashed = True
        self._contents = [_Content(), _Content()]

    def add(self, a: Tensor, b: Tensor) -> None:
        """Compare the next elements of both, one-dimensional."""
        self._dtypes = str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")
        for one, other in zip(a.split(_PIECE), b.split(_PIECE), strict=True):
            if not self._add_equal(one, other):
                self._add(one, other)
            self._reached += one.numel()

    @property
    def contents(self) -> tuple[Hashable, Hashable] | None:
        """Hashes of the values of A and of B in any order, rounded to the narrower type; None where parts are equal."""
        return (self._contents[0].hash, self._contents[1].hash) if self._all_hashed else None

    def result(self, state: str, name: str) -> TensorDifference:
        """Return the outcome, once all elements were added."""
        first = self._first
        index = None if first is None else torch.unravel_index(torch.tensor(first[0]), self._shape)
        one, other = self._contents
        return TensorDifference(
            state,
            name,
            self._shape,
            self._dtypes,
            self._differing,
            self._max_absolute,
            _ratio(self._max_absolute, self._largest),
            _ratio(math.sqrt(self._squares), math.sqrt(self._squares_of_a)),
            self._ulp if self._dtypes[0] == self._dtypes[1] else None,
            None if index is None else tuple(int(each) for each in index),
            None if first is None else first[1:],
            self._both_nan,
            self._rounded if self._differing and self._all_rounded else None,
            # Parts that are equal have the same values in any case.
            bool(self._differing) and one.hash == other.hash,
        )

    def _add_equal(self, a: Tensor, b: Tensor) -> bool:
        """Add pieces with the same bits and no NaN, the usual case, in few passes; False: these are others."""
        if a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
            return False
        low, high = torch.aminmax(a)
        largest = max(abs(low.item()), abs(high.item()))
        if not math.isfinite(largest):
            return False
        self._largest = max(self._largest, largest)
        self._squares_of_a += torch.linalg.vector_norm(a, dtype=torch.float64).item() ** 2
        self._all_rounded = self._all_hashed = False
        return True

    def _add(self, a: Tensor, b: Tensor) -> None:
        # float64 holds every value of the other types exactly.
        x, y = a.double(), b.double()
        differs = x != y
        away, size = (x - y).abs_(), x.abs()
        sound = math.isfinite(away.max().item()) and math.isfinite(size.max().item())
        if not sound:
            nan = x.isnan() & y.isnan()
            self._both_nan += int(nan.sum())
            differs &= ~nan
            # One that is NaN or infinite differs without bound.
            away = away.nan_to_num(nan=math.inf).masked_fill(~differs, 0.0)
            size.masked_fill_(~size.isfinite(), 0.0)
        self._largest = max(self._largest, size.max().item())
        self._squares_of_a += size.dot(size).item()
        self._check_rounding(a, b)
        if count := int(differs.sum()):
            self._differing += count
            self._max_absolute = max(self._max_absolute, away.max().item())
            self._squares += away.dot(away).item()
            if self._first is None:
                place = int(differs.int().argmax())
                self._first = self._reached + place, x[place].item(), y[place].item()
            if a.dtype == b.dtype:
                known = slice(None) if sound else ~(x.isnan() | y.isnan())
                self._ulp = max(self._ulp, _most_steps(a[known], b[known]))

    def _check_rounding(self, a: Tensor, b: Tensor) -> None:
        narrow = a.dtype if a.element_size() <= b.element_size() else b.dtype
        of_a, of_b = a.to(narrow), b.to(narrow)
        for content, values in zip(self._contents, (of_a, of_b), strict=True):
            content.add(values)
        if a.element_size() == b.element_size():
            self._all_rounded = False
            return
        self._rounded = "A" if a.dtype == narrow else "B"
        self._all_rounded &= bool(((of_a == of_b) | (of_a.isnan() & of_b.isnan())).all())


class _Content:
    """A hash of values that does not depend on their order: sums of their bits and of the squares, which wrap."""

    def __init__(self) -> None:
        self._sums = [0, 0]

    def add(self, values: Tensor) -> None:
        bits = _bits(values).long()
        for place, added in enumerate((bits, bits * bits)):
            self._sums[place] = (self._sums[place] + int(added.sum())) % (1 << 64)

    @property
    def hash(self) -> Hashable:
        return tuple(self._sums)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _bits(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.element_size()])


def _most_steps(a: Tensor, b: Tensor) -> float:
    """Return the largest number of representable values from an element of `a` to that of `b`; none is NaN."""
    if not a.numel():
        return 0.0
    one, other = _ordered(a), _ordered(b)
    steps = one - other
    if a.dtype == torch.float64:  # a difference of int64 may wrap
        across = (one < 0) != (other < 0)
        steps = torch.where(across, one.double() - other.double(), steps.double())
    return float(steps.abs().max())


def _ordered(values: Tensor) -> Tensor:
    """Return int64 numbers in the order of the values; neighbours differ by one."""
    bits = _bits(values)
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits).long()
