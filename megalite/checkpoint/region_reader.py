"""A safetensors file read by position: of a region its own bytes alone, and none of them mapped.

What is mapped counts in a process's memory, page by page, until the file is closed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.regions import stretches
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.topology.sharding import Box

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that a model or its optimizer may have, by their names in a file."""


class RegionReader:
    """Reads regions of the tensors of one file, whose types are among TYPES."""

    def __init__(self, path: Path, header: Mapping[str, HeaderEntry] | None = None):
        """header: as `read_header` gave it. Raises OSError, and ValueError where the header is not right."""
        self.path, self.header = path, read_header(path) if header is None else header
        self._file = path.open("rb", buffering=0)

    def close(self) -> None:
        self._file.close()

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
        data = memoryview(_bytes_of(values))
        position = self.header[name].start + start * values.element_size()
        while data:
            count = os.preadv(self._file.fileno(), [data], position)
            if count == 0:
                raise OSError(f"the file ends at byte {position}: it was cut short")
            data, position = data[count:], position + count


def _bytes_of(values: Tensor) -> Any:
    return values.view(torch.uint8).numpy()
