"""Read regions of a safetensors file with pread: only the bytes of the region, and no mmap.

Mapped pages would count as the process's memory until the file is closed.
"""

import os
from collections.abc import Mapping
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.regions import stretches
from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.topology.dtypes import FLOATS
from megalite.topology.sharding import TensorSlice

TYPES: dict[str, torch.dtype] = {kind.code: getattr(torch, name) for name, kind in FLOATS.items()}
"""dtype in a file's header -> torch dtype, for the dtypes that weights and optimizer state can have."""

_READABLE = {**TYPES, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}


class RegionReader:
    """Reads regions of the tensors of one file; their dtypes must be in TYPES, or "I8", "U8", "F8_E4M3"."""

    def __init__(self, path: Path, header: Mapping[str, HeaderEntry]):
        """header: from `read_header`. The file is opened at the first read."""
        self.path, self.header = path, header
        self._file: FileIO | None = None

    def open(self) -> None:
        """Open the file, before several threads read it. Raises OSError."""
        _ = self._handle

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, name: str, region: TensorSlice | None = None) -> Tensor:
        """Return a region of a tensor; None: the whole tensor. Raises OSError."""
        entry = self.header[name]
        region = region or TensorSlice((0,) * len(entry.shape), entry.shape)
        values = torch.empty(region.shape, dtype=_READABLE[entry.dtype])
        size, data, reached = values.element_size(), _bytes_of(values.view(-1)), 0
        self._announce(entry, region, size)
        for start, numel in stretches(entry.shape, region):
            self._fill(data[reached : reached + numel * size], entry.start + start * size)
            reached += numel * size
        return values

    def fill(self, values: Tensor, name: str, start: int = 0) -> None:
        """Fill `values`, 1-D and of the file's dtype, with a flattened tensor's elements from `start` on."""
        self._fill(_bytes_of(values), self.header[name].start + start * values.element_size())

    def _fill(self, data: memoryview, position: int) -> None:
        while data:
            count = os.preadv(self._handle, [data], position)
            if count == 0:
                raise OSError(f"the file ends at byte {position}: it was cut short")
            data, position = data[count:], position + count

    def _announce(self, entry: HeaderEntry, region: TensorSlice, size: int) -> None:
        """Ask the kernel to prefetch a region of columns; row by row the reads would be several times slower.

        The other columns are prefetched too: other ranks of the machine usually read them.
        """
        if region.numel and region.shape[1:] != entry.shape[1:]:
            width = prod(entry.shape[1:]) * size
            first, length = entry.start + region.offsets[0] * width, region.shape[0] * width
            os.posix_fadvise(self._handle, first, length, os.POSIX_FADV_WILLNEED)

    @property
    def _handle(self) -> int:
        if self._file is None:
            self._file = FileIO(self.path)
        return self._file.fileno()


def _bytes_of(values: Tensor) -> memoryview:
    data: Any = values.view(torch.uint8).numpy()
    return memoryview(data)
