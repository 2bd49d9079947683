"""Memory of a kernel, with checks of bounds, of uninitialised reads, and of races between threads.

Global memory is this process's memory: addresses are pointers, and only registered allocations may be accessed.
"""

import ctypes
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

SHARED_BASE = 0x480
"""Start of a block's shared memory: aligned to 128 bytes but no more."""

GENERIC_SHARED = 1 << 60
"""Generic addresses from here on are shared memory."""

_GRANULE = 2  # bytes per entry of a shadow: no kernel here stores fewer

Array = NDArray[np.generic]
Index = NDArray[np.int64]


class Fault(Exception):
    """A kernel does something that a GPU refuses or leaves undefined. lane: which of the accessing threads."""

    def __init__(self, what: str, lane: int = 0) -> None:
        super().__init__(what)
        self.lane = lane


def _process(kind: type[np.generic]) -> Array:
    """Return the whole address space as one array, whose element i is at address i * its size."""
    whole = (ctypes.c_char * ((1 << 47) - 4096)).from_address(4096)
    return np.frombuffer(whole, dtype=kind)


class Shadow:
    """The last reader and writer of each granule, to find races: accesses ordered by no barrier of block or warp.

    A thread's number is block * 1024 + thread, so that its warp and block are shifts.
    """

    ONE, WARP, BLOCK, GRID = range(4)  # the smallest scope that contains all readers of a granule

    def __init__(self, granules: int) -> None:
        self.writer = np.full(granules, -1, np.int64)
        self.reader = np.full(granules, -1, np.int64)
        self.readers = np.zeros(granules, np.int8)
        # The number of barriers of the block and of the warp that the thread had passed at its access.
        self.write_block, self.write_warp = np.zeros(granules, np.int32), np.zeros(granules, np.int32)
        self.read_block, self.read_warp = np.zeros(granules, np.int32), np.zeros(granules, np.int32)

    def read(self, at: Index, thread: Index, block: Array, warp: Array) -> None:
        """Record reads of the granules `at`; block, warp: the barriers that the threads have passed."""
        self._after_write(at, thread, block, warp, "reads what another thread wrote, with no barrier between")
        old = self.reader[at]
        same_block, same_warp = old >> 10 == thread >> 10, old >> 5 == thread >> 5
        apart = np.where(
            same_warp,
            np.where(old == thread, self.ONE, self.WARP),
            np.where(same_block, self.BLOCK, self.GRID),
        )
        apart = np.maximum(apart, self.readers[at])
        ordered = same_block & (self.read_block[at] < block)
        ordered |= same_warp & (self.read_warp[at] < warp) & (apart <= self.WARP)
        forgotten = (old < 0) | (ordered & (apart < self.GRID))
        self.reader[at] = thread
        self.readers[at] = np.where(forgotten, self.ONE, apart)
        self.read_block[at], self.read_warp[at] = block, warp
        last = self.reader[at]
        others = last != thread
        if others.any():
            far = np.where(
                last >> 5 == thread >> 5,
                self.WARP,
                np.where(last >> 10 == thread >> 10, self.BLOCK, self.GRID),
            )
            np.maximum.at(self.readers, at[others], far[others].astype(np.int8))

    def write(self, at: Index, thread: Index, block: Array, warp: Array) -> None:
        """Record writes of the granules `at`."""
        self._after_write(
            at, thread, block, warp, "writes what another thread wrote, with no barrier between"
        )
        old, readers = self.reader[at], self.readers[at]
        same_block, same_warp = old >> 10 == thread >> 10, old >> 5 == thread >> 5
        ordered = (old < 0) | ((readers == self.ONE) & (old == thread))
        ordered |= (readers < self.GRID) & same_block & (self.read_block[at] < block)
        ordered |= (readers <= self.WARP) & same_warp & (self.read_warp[at] < warp)
        _refuse(~ordered, "writes what another thread read, with no barrier between")
        self.writer[at] = thread
        _refuse(self.writer[at] != thread, "writes where another thread writes at once")
        self.write_block[at], self.write_warp[at] = block, warp

    def written(self, at: Index) -> NDArray[np.bool_]:
        return self.writer[at] >= 0

    def _after_write(self, at: Index, thread: Index, block: Array, warp: Array, what: str) -> None:
        old = self.writer[at]
        ordered = (old < 0) | (old == thread)
        ordered |= (old >> 10 == thread >> 10) & (self.write_block[at] < block)
        ordered |= (old >> 5 == thread >> 5) & (self.write_warp[at] < warp)
        _refuse(~ordered, what)


def _refuse(wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        lanes = np.nonzero(wrong)
        raise Fault(what, int(lanes[-1][0]))


class Global:
    """Global memory during one launch."""

    _arrays: ClassVar[dict[str, Array]] = {}

    def __init__(self, allocations: list[tuple[int, int]], *, watched: bool = True) -> None:
        """allocations: address and bytes of each. watched: whether unordered accesses are faults."""
        ordered = sorted((begin, size) for begin, size in allocations if size)
        self.begins = np.array([begin for begin, _ in ordered], np.uint64)
        self.ends = np.array([begin + size for begin, size in ordered], np.uint64)
        granules = [(size + 2 * _GRANULE - 1) // _GRANULE for _, size in ordered]
        self.first = np.concatenate([[0], np.cumsum(granules)]).astype(np.int64)
        self.shadow = Shadow(int(self.first[-1])) if watched else None

    def places(self, address: Array, size: int) -> Index:
        """The granules [of an access, of its threads] from each address on."""
        which = np.searchsorted(self.begins, address, side="right").astype(np.int64) - 1
        inside = which >= 0
        if len(self.begins):
            inside &= (address + np.uint64(size) <= self.ends[which]) & (address + np.uint64(size) >= address)
        for lane in np.flatnonzero(~inside)[:1]:
            raise Fault(
                f"touches {size} bytes at {int(address[lane]):#x}, outside of every allocation", int(lane)
            )
        begin = self.first[which] + ((address - self.begins[which]) // np.uint64(_GRANULE)).astype(np.int64)
        return begin + np.arange(max(1, size // _GRANULE))[:, None]

    def index(self, address: Array, kind: str) -> tuple[Array, Index]:
        """An array, and where in it the addresses are."""
        if kind not in self._arrays:
            self._arrays[kind] = _process(np.dtype(kind).type)
        size = np.dtype(kind).itemsize
        return self._arrays[kind], ((address - np.uint64(4096)) // np.uint64(size)).astype(np.int64)


class Shared:
    """Shared memory of some blocks, whose bytes are nothing to rely on until they are written.

    unwritten: what a byte that nobody wrote is read as; None: to read one is a fault.
    """

    def __init__(self, blocks: int, size: int, unwritten: int | None) -> None:
        self.unwritten = unwritten
        self.size = -(-size // 16) * 16
        self.limit = size
        self.bytes = np.full(blocks * self.size, unwritten or 0, np.uint8)
        self.shadow = Shadow(blocks * self.size // _GRANULE)

    def places(self, address: Array, size: int, block: Index) -> Index:
        offset = address.astype(np.int64) - SHARED_BASE
        for lane in np.flatnonzero((offset < 0) | (offset + size > self.limit))[:1]:
            said = (
                f"touches {size} bytes at offset {int(offset[lane])} of {self.limit} bytes of shared memory"
            )
            raise Fault(said, int(lane))
        return (block * self.size + offset) // _GRANULE + np.arange(max(1, size // _GRANULE))[:, None]

    def index(self, address: Array, kind: str, block: Index) -> tuple[Array, Index]:
        offset = block * self.size + address.astype(np.int64) - SHARED_BASE
        return self.bytes.view(kind), offset // np.dtype(kind).itemsize
