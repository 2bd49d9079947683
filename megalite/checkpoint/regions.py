"""Arithmetic of regions: boxes of a full tensor and runs of a flattened box. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from megalite.topology.sharding import Part, TensorSlice


@dataclass(frozen=True)
class PartRun:
    """A run of one part's box: elements `start` to `stop` of the flattened (row-major) box.

    offset: where these elements stand in the run of the registered parameter that was split.
    """

    part: Part
    box: TensorSlice
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split_run(boxes: Iterable[tuple[Part, TensorSlice]], start: int, numel: int) -> Iterator[PartRun]:
    """Split a run of a flattened local parameter by its parts; parts it does not touch are left out.

    boxes: as ShardSpec.boxes gives them. They are stacked along dim 0, so the flattened parameter is the
    flattened boxes one after the other.
    """
    stop, first = start + numel, 0
    for part, box in boxes:
        low, high = max(start, first), min(stop, first + box.numel)
        if low < high:
            yield PartRun(part, box, low - first, high - first, low - start)
        first += box.numel


def intersection(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """The region that both boxes hold; None where they have no element in common."""
    offsets, shape = [], []
    for a, a_size, b, b_size in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True):
        low, high = max(a, b), min(a + a_size, b + b_size)
        if low >= high:
            return None
        offsets.append(low)
        shape.append(high - low)
    return TensorSlice(tuple(offsets), tuple(shape))


def slices(inner: TensorSlice, outer: TensorSlice) -> tuple[slice, ...]:
    """Where `inner`, a region of `outer`, lies in a tensor that holds `outer`."""
    starts = [low - base for low, base in zip(inner.offsets, outer.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.shape, strict=True))


def contains(full_shape: tuple[int, ...], box: TensorSlice) -> bool:
    """Whether the box has the tensor's number of dims and lies within it."""
    if not len(full_shape) == len(box.shape) == len(box.offsets):
        return False
    spans = zip(box.offsets, box.shape, full_shape, strict=True)
    return all(low >= 0 and low + size <= full for low, size, full in spans)


def rows_of(box: TensorSlice, most_elements: int) -> Iterator[TensorSlice]:
    """The region in pieces of whole rows, from the first on: as many a piece as have no more elements, at least one."""
    step = max(1, most_elements // max(1, prod(box.shape[1:])))
    for first in range(0, box.shape[0], step):
        offsets = (box.offsets[0] + first, *box.offsets[1:])
        yield TensorSlice(offsets, (min(step, box.shape[0] - first), *box.shape[1:]))


def stretches(full_shape: tuple[int, ...], box: TensorSlice) -> Iterator[tuple[int, int]]:
    """Where a region lies in the flattened (row-major) tensor: start and length of each stretch, in its own order."""
    if not box.numel:
        return
    # The dims from here on are whole, so that a stretch goes on from one index of the dim before to the next.
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
