"""A safetensors file read by position: of a region its own bytes alone, and none of them mapped.

What is mapped counts in a process's memory, page by page, until the file is closed.
"""

import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.regions import stretches
from megalite.checkpoint.tensor_header import HeaderEntry
from megalite.topology.sharding import Box

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that a model or its optimizer may have, by their names in a file."""


class RegionReader:
    """Reads regions of the tensors of one file, whose types are among TYPES."""

    def __init__(self, path: Path, header: Mapping[str, HeaderEntry]):
        """header: as `read_header` gave it. The file is opened when something of it is read."""
        self.path, self.header = path, header
        self._file: FileIO | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A region of a tensor, or all of it. Raises OSError."""
        shape = self.header[name].shape
        region = box or Box((0,) * len(shape), shape)
        values = torch.empty(region.shape, dtype=TYPES[self.header[name].dtype])
        flat, reached = values.view(-1), 0
        for start, numel in stretches(shape, region):
            self.fill(flat[reached : reached + numel], name, start)
            reached += numel
        return values

    def fill(self, values: Tensor, name: str, start: int = 0) -> None:
        """Fill `values`, flat and of the file's type, with a flattened tensor's elements from `start` on."""
        if self._file is None:
            self._file = FileIO(self.path)
        data = memoryview(_bytes_of(values))
        position = self.header[name].start + start * values.element_size()
        while data:
            count = os.preadv(self._file.fileno(), [data], position)
            if count == 0:
                raise OSError(f"the file ends at byte {position}: it was cut short")
            data, position = data[count:], position + count


def _bytes_of(values: Tensor) -> Any:
    return values.view(torch.uint8).numpy()
