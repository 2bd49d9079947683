"""Arithmetic on regions of a full tensor (TensorSlice) and on flat ranges of a flattened region. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from megalite.topology.sharding import Part, TensorSlice


@dataclass(frozen=True)
class PartRange:
    """A flat range of one part's region: elements `start` to `stop` of the flattened (row-major) region.

    offset: index of the first of these elements in the flat range of the registered parameter that was split.
    """

    part: Part
    region: TensorSlice
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split_flat_range(
    regions: Iterable[tuple[Part, TensorSlice]], start: int, numel: int
) -> Iterator[PartRange]:
    """Split a flat range of a local parameter by the parameter's parts; yields only the parts it overlaps.

    regions: from ShardSpec.slices. They are stacked along dim 0, so the flattened parameter is the concatenation of the
    flattened regions.
    """
    stop, first = start + numel, 0
    for part, region in regions:
        low, high = max(start, first), min(stop, first + region.numel)
        if low < high:
            yield PartRange(part, region, low - first, high - first, low - start)
        first += region.numel


def full_slice(shape: tuple[int, ...]) -> TensorSlice:
    """Return the region of a whole tensor."""
    return TensorSlice((0,) * len(shape), shape)


def intersection(first: TensorSlice, second: TensorSlice) -> TensorSlice | None:
    """Return the region of the elements in both regions; None if there are none."""
    offsets, shape = [], []
    for a, a_size, b, b_size in zip(first.offsets, first.shape, second.offsets, second.shape, strict=True):
        low, high = max(a, b), min(a + a_size, b + b_size)
        if low >= high:
            return None
        offsets.append(low)
        shape.append(high - low)
    return TensorSlice(tuple(offsets), tuple(shape))


def index_in(inner: TensorSlice, outer: TensorSlice) -> tuple[slice, ...]:
    """Return the index that selects `inner`, a region of `outer`, from a tensor that holds `outer`."""
    starts = [low - base for low, base in zip(inner.offsets, outer.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.shape, strict=True))


def contains(full_shape: tuple[int, ...], region: TensorSlice) -> bool:
    """Whether the region has the tensor's number of dims and lies inside the tensor."""
    if not len(full_shape) == len(region.shape) == len(region.offsets):
        return False
    spans = zip(region.offsets, region.shape, full_shape, strict=True)
    return all(low >= 0 and low + size <= full for low, size, full in spans)


def signed_corners(region: TensorSlice) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the 2**n corners of a region of n dims, each with 1 or -1 for an even or odd number of upper ends."""
    spans = (((low, 1), (low + size, -1)) for low, size in zip(region.offsets, region.shape, strict=True))
    for ends in product(*spans):
        yield tuple(end for end, _ in ends), prod(sign for _, sign in ends)


def rows_of(region: TensorSlice, most_elements: int) -> Iterator[TensorSlice]:
    """Split a region into blocks of whole rows with at most `most_elements` elements each, but at least one row."""
    step = max(1, most_elements // max(1, prod(region.shape[1:])))
    for first in range(0, region.shape[0], step):
        offsets = (region.offsets[0] + first, *region.offsets[1:])
        yield TensorSlice(offsets, (min(step, region.shape[0] - first), *region.shape[1:]))


def stretches(full_shape: tuple[int, ...], region: TensorSlice) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each contiguous stretch of a region in the flattened (row-major) tensor, in order."""
    if not region.numel:
        return
    # The dims from `whole` on are complete, so a stretch continues over consecutive indices of the dim before.
    whole = len(full_shape)
    while whole and region.shape[whole - 1] == full_shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    numel = prod(region.shape[outer:])
    strides = [prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    first = sum(low * stride for low, stride in zip(region.offsets, strides, strict=True))
    steps = (
        range(0, size * stride, stride) for size, stride in zip(region.shape[:outer], strides, strict=False)
    )
    for step in product(*steps):
        yield first + sum(step), numel
