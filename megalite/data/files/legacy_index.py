"""Indices of Megatron's former "lazy" and "cached" data sets, which Megatron-DeepSpeed and GPT-NeoX wrote too.

X.idx, little-endian: b"TNTIDX\\0\\0", uint64 version 1, uint64 dtype code, uint64 bytes of a token, uint64 items,
uint64 sizes, uint64 documents + 1; then int64 each: items + 1 numbers of sizes before an item, items + 1 tokens before
an item in X.bin, the sizes, and the first item of each document. An item of one dimension, a sequence of tokens, has
one size. Without the documents it is fairseq's index.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.errors import DataError

LEGACY_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<8sQQQQQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LONGEST = 2**31 - 1


class LegacyIndex(NamedTuple):
    """The index as of a TokenFile: lengths in tokens, offsets in bytes, the first sequence of each document."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]


def read_legacy_index(idx: Path) -> LegacyIndex:
    """Read the whole index; memory is bounded by the size of the file. Raises DataError, OSError."""
    size = idx.stat().st_size
    with idx.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise _damaged(idx, f"has {size} bytes, fewer than its header")
        _, version, code, item_bytes, items, sizes, documents = _HEADER.unpack(header)
        if version != 1:
            raise DataError(f"{idx} has version {version}; only version 1 is known")
        if code not in _DTYPES:
            raise DataError(
                f"{idx} has dtype code {code}, which holds no token ids; known are {sorted(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[code])
        expected = _HEADER.size + 8 * (2 * (items + 1) + sizes + documents)
        if size != expected or documents < 1:
            raise _damaged(idx, f"has {size} bytes where its header says {expected}")
        if item_bytes != dtype.itemsize or sizes != items:
            raise _damaged(idx, f"has {sizes} sizes of {items} sequences, {item_bytes} bytes for a {dtype}")
        sizes_before = np.fromfile(file, "<i8", items + 1)
        tokens_before = np.fromfile(file, "<i8", items + 1)
        lengths = np.fromfile(file, "<i8", items)
        starts = np.fromfile(file, "<i8", documents)
    fits = items == 0 or (lengths.min() >= 0 and lengths.max() <= _LONGEST)
    if not fits or not np.array_equal(sizes_before, np.arange(items + 1)):
        raise _damaged(idx, "has sequences of more than one dimension, or of an impossible length")
    # A sum cannot overflow: fewer than 2**32 lengths fit a file of 2**37 bytes, each below 2**31.
    if not np.array_equal(tokens_before, np.concatenate([[0], np.cumsum(lengths)])):
        raise _damaged(idx, "has sequences that do not lie end to end")
    return LegacyIndex(dtype, lengths.astype(np.int32), tokens_before[:-1] * dtype.itemsize, starts)


def _damaged(idx: Path, what: str) -> DataError:
    return DataError(f"{idx} {what}; the pair is damaged or half copied: prepare or copy both files again")
