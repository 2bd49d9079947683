"""Arithmetic on regions: boxes of a full tensor and flat ranges of a flattened box. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from megalite.topology.sharding import Part, TensorSlice


@dataclass(frozen=True)
class PartRange:
    """A flat range of one part's box: elements `start` to `stop` of the flattened (row-major) box.

    offset: index of the first of these elements in the flat range of the registered parameter that was split.
    """

    part: Part
    box: TensorSlice
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split_flat_range(
    boxes: Iterable[tuple[Part, TensorSlice]], start: int, numel: int
) -> Iterator[PartRange]:
    """Split a flat range of a local parameter by the parameter's parts; yields only the parts it overlaps.

    boxes: from ShardSpec.boxes. They are stacked along dim 0, so the flattened parameter is the concatenation of the
    flattened boxes.
    """
    stop, first = start + numel, 0
    for part, box in boxes:
        low, high = max(start, first), min(stop, first + box.numel)
        if low < high:
            yield PartRange(part, box, low - first, high - first, low - start)
        first += box.numel


def full_box(shape: tuple[int, ...]) -> TensorSlice:
    """Return the box of a whole tensor."""
    return TensorSlice((0,) * len(shape), shape)


def intersection(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """Return the box of the elements in both boxes; None if there are none."""
    offsets, shape = [], []
    for a, a_size, b, b_size in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True):
        low, high = max(a, b), min(a + a_size, b + b_size)
        if low >= high:
            return None
        offsets.append(low)
        shape.append(high - low)
    return TensorSlice(tuple(offsets), tuple(shape))


def slices(inner: TensorSlice, outer: TensorSlice) -> tuple[slice, ...]:
    """Return the slices that select `inner`, a region of `outer`, from a tensor that holds `outer`."""
    starts = [low - base for low, base in zip(inner.offsets, outer.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.shape, strict=True))


def contains(full_shape: tuple[int, ...], box: TensorSlice) -> bool:
    """Whether the box has the tensor's number of dims and lies inside the tensor."""
    if not len(full_shape) == len(box.shape) == len(box.offsets):
        return False
    spans = zip(box.offsets, box.shape, full_shape, strict=True)
    return all(low >= 0 and low + size <= full for low, size, full in spans)


def rows_of(box: TensorSlice, most_elements: int) -> Iterator[TensorSlice]:
    """Split a box into blocks of whole rows with at most `most_elements` elements each, but at least one row."""
    step = max(1, most_elements // max(1, prod(box.shape[1:])))
    for first in range(0, box.shape[0], step):
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        yield TensorSlice(offsets, (min(step, box.shape[0] - first), *box.shape[1:]))


def stretches(full_shape: tuple[int, ...], box: TensorSlice) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each contiguous stretch of a box in the flattened (row-major) tensor, in order."""
    if not box.numel:
        return
    # The dims from `whole` on are complete, so a stretch continues over consecutive indices of the dim before.
    whole = len(full_shape)
    while whole and box.shape[whole - 1] == full_shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    numel = prod(box.shape[outer:])
    strides = [prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    first = sum(low * stride for low, stride in zip(box.offsets, strides, strict=True))
    steps = (
        range(0, size * stride, stride) for size, stride in zip(box.shape[:outer], strides, strict=False)
    )
    for step in product(*steps):
        yield first + sum(step), numel
