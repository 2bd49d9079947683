"""Write safetensors files one tensor at a time, hashing each tensor."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.errors import CheckpointError
from megalite.launcher.control.progress import progress
from megalite.topology.dtypes import FLOATS, NUMBER_TYPES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
# The safetensors library sorts by dtype, largest alignment first, then by name.
_CODES: dict[torch.dtype, str] = {getattr(torch, kind.name): kind.code for kind in NUMBER_TYPES}
_ORDER = list(_CODES.values())
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of one tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32, and so on. Raises CheckpointError for a dtype the format lacks."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"a checkpoint cannot hold {dtype}; it holds {', '.join(DTYPES)}")


def write_tensor_file(
    path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor | Iterable[Tensor]]
) -> tuple[dict[str, str], int]:
    """Write one safetensors file with one tensor in memory at a time, and sync it to the disk.

    read: returns a key's tensor, or its rows in consecutive blocks; called once per key, in the file's order.
    The file equals that of safetensors.torch.save_file with metadata {"format": "pt"}, byte by byte.
    Returns key -> sha256 of its bytes, and the file's size in bytes.
    """
    ordered = sorted(infos, key=lambda key: (_ORDER.index(_CODES[infos[key].dtype]), key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in ordered:
        info = infos[key]
        span = [offset, offset + info.size_bytes]
        header[key] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    hashes = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in ordered:
            values, digest, numel = read(key), hashlib.sha256(), 0
            for block in (values,) if isinstance(values, Tensor) else values:
                if block.dtype != infos[key].dtype or block.shape[1:] != infos[key].shape[1:]:
                    raise AssertionError(
                        f"{key} was announced as {infos[key]}, not {block.dtype}, {block.shape}"
                    )
                numel, data = numel + block.numel(), tensor_bytes(block)
                for start in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[start : start + _CHUNK_BYTES]
                    digest.update(chunk)
                    file.write(chunk)
                    progress.beat()
            if numel != prod(infos[key].shape):
                raise AssertionError(f"{key} was announced as {infos[key]}, and has {numel} elements")
            hashes[key] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return hashes, 8 + len(text) + offset


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's elements, row-major, as bytes; without a copy for a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)
