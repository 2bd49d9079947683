"""Safetensors files: a streaming writer that hashes what it writes, a reader that checks what it reads."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.folder import own_file, read_manifest
from megalite.checkpoint.format import WEIGHT, Manifest, Shard, TensorEntry, check_sizes
from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.regions import intersection, rows_of, slices
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.errors import CheckpointError
from megalite.topology.sharding import TensorSlice

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CODES = {dtype: code for code, dtype in TYPES.items()}
# The library puts types with the strictest alignment first, then goes by name.
_ORDER = list(_CODES.values())
_CHUNK_BYTES = 16 << 20
BLOCK_ELEMENTS = 4 << 20
"""What is read at a time of a tensor that need not be whole in memory."""
# Hashed beside the reading of the next.
_HASHED_ELEMENTS = 1 << 18
_REMEDY = "use another checkpoint"


@dataclass(frozen=True)
class TensorInfo:
    """Type and shape of one entry of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32; raises CheckpointError for a type that the format does not hold."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"a checkpoint cannot hold {dtype}; it holds {', '.join(DTYPES)}")


def write_tensor_file(
    path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor | Iterable[Tensor]]
) -> tuple[dict[str, str], int]:
    """Write one safetensors file, with one tensor in memory at a time, and wait until it is on the disk.

    read: gives the tensor of a key, or its rows in blocks from the first to the last, asked once a key in the file's
    order. The bytes are those of safetensors.torch.save_file with metadata {"format": "pt"}. Returns each key's sha256
    and the file's size.
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
            given, digest, numel = read(key), hashlib.sha256(), 0
            for block in (given,) if isinstance(given, Tensor) else given:
                if block.dtype != infos[key].dtype or block.shape[1:] != infos[key].shape[1:]:
                    raise AssertionError(
                        f"{key} was announced as {infos[key]}, not {block.dtype}, {block.shape}"
                    )
                numel, data = numel + block.numel(), tensor_bytes(block)
                for start in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[start : start + _CHUNK_BYTES]
                    digest.update(chunk)
                    file.write(chunk)
            if numel != prod(infos[key].shape):
                raise AssertionError(f"{key} was announced as {infos[key]}, and has {numel} elements")
            hashes[key] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return hashes, 8 + len(text) + offset


def full_box(shape: tuple[int, ...]) -> TensorSlice:
    """The region that is the whole tensor."""
    return TensorSlice((0,) * len(shape), shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements, row-major, as bytes; no copy for a contiguous tensor on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


class CheckpointReader:
    """Reads any region of any tensor of a checkpoint of any layout; opens only the files it needs.

    Reading raises CheckpointError, naming file and tensor, when a file is missing, cut short or altered.
    """

    def __init__(self, checkpoint: Path, *, verify_hashes: bool = True, weights: str = WEIGHT):
        """`weights`: the kind that is read as the weights. Raises CheckpointError when it is not there."""
        self.checkpoint, self.verify_hashes, self.weights = checkpoint, verify_hashes, weights
        self.manifest: Manifest = read_manifest(checkpoint)
        if weights not in self.manifest.tensors:
            raise CheckpointError(f"{checkpoint} has no {weights}; it has {', '.join(self.manifest.tensors)}")
        check_sizes(self.manifest, checkpoint)
        self._files: dict[str, RegionReader] = {}
        # One thread, as a hash is of bytes in their order.
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hashing")
        self._hashed: Future[None] | None = None

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashing.shutdown()
        for opened in self._files.values():
            opened.close()
        self._files.clear()

    def read(self, kind: str, name: str, box: TensorSlice, run: tuple[int, int] | None = None) -> Tensor:
        """The region `box` of a tensor, in its shape; with `run`, those elements of it flattened."""
        entry = self._entry(kind, name)
        start, stop = run or (0, box.numel)
        exact = [shard for shard in entry.shards if shard.box == box]
        if exact:
            values = self._runs(name, entry, exact, start, stop)
        else:
            values = self._assemble(name, entry, box).view(-1)[start:stop]
        return values if run else values.view(box.shape)

    def blocks(self, kind: str, name: str) -> Iterator[Tensor]:
        """A whole tensor, some rows at a time from the first to the last; each byte is read, and hashed, once."""
        entry = self._entry(kind, name)
        self._require_files(name, entry.shards)
        digests = {shard: hashlib.sha256() for shard in entry.shards}
        for block in rows_of(full_box(entry.shape), BLOCK_ELEMENTS):
            values = torch.empty(block.shape, dtype=DTYPES[entry.dtype])
            for source, shards in entry.by_box().items():
                if overlap := intersection(source, block):
                    # Rows of the source lie one after the other there, so that its shards are read from end to end.
                    start = (overlap.offsets[0] - source.offsets[0]) * prod(source.shape[1:])
                    held = torch.empty(overlap.shape, dtype=values.dtype)
                    for shard, low, target in _overlapping(shards, start, held.view(-1)):
                        self._fill(name, entry, shard, low, target, digests[shard])
                    values[slices(overlap, block)] = held
            yield values

    def read_all(self) -> None:
        """Every shard once: a whole checkpoint may still hold other bytes than were written."""
        for entries in self.manifest.tensors.values():
            for name, entry in entries.items():
                for shard in entry.shards:
                    self._shard(name, entry, shard)

    def _entry(self, kind: str, name: str) -> TensorEntry:
        return self.manifest.tensors[self.weights if kind == WEIGHT else kind][name]

    def _runs(self, name: str, entry: TensorEntry, shards: Iterable[Shard], start: int, stop: int) -> Tensor:
        """Elements start to stop of a box, from the runs of that same box."""
        held = [shard for shard in shards if max(start, shard.run[0]) < min(stop, shard.run[1])]
        self._require_files(name, held)
        values = torch.empty(stop - start, dtype=DTYPES[entry.dtype])
        for shard, low, target in _overlapping(held, start, values):
            if not self.verify_hashes:
                self._fill(name, entry, shard, low, target)
            elif target.numel() == _numel(shard):
                self._fill(name, entry, shard, 0, target, hashlib.sha256())
            else:  # a hash is of all of it
                target.copy_(self._shard(name, entry, shard)[low : low + target.numel()])
        return values

    def _assemble(self, name: str, entry: TensorEntry, box: TensorSlice) -> Tensor:
        """The region `box`, from every box that overlaps it."""
        groups = {source: shards for source, shards in entry.by_box().items() if intersection(source, box)}
        self._require_files(name, [shard for shards in groups.values() for shard in shards])
        values = torch.empty(box.shape, dtype=DTYPES[entry.dtype])
        for source, shards in groups.items():
            overlap = intersection(source, box)
            assert overlap is not None
            held = self._runs(name, entry, shards, 0, source.numel).view(source.shape)
            values[slices(overlap, box)] = held[slices(overlap, source)]
        return values

    def _require_files(self, name: str, shards: Iterable[Shard]) -> None:
        """Before anything as large as the manifest says is made: files of that size there must be."""
        for shard in shards:
            self._place(name, shard)

    def _shard(self, name: str, entry: TensorEntry, shard: Shard) -> Tensor:
        self._place(name, shard)
        values = torch.empty(_numel(shard), dtype=DTYPES[entry.dtype])
        self._fill(name, entry, shard, 0, values, hashlib.sha256())
        return values

    def _fill(
        self, name: str, entry: TensorEntry, shard: Shard, low: int, values: Tensor, digest: Any = None
    ) -> None:
        """Read a shard's elements from the `low`th on, as many as `values` has.

        digest: has those before; with the last element it has to be the shard's, where hashes are looked at.
        """
        path, place = self.checkpoint / shard.file, self._place(name, shard)
        if TYPES.get(place.dtype) != DTYPES[entry.dtype] or prod(place.shape) != _numel(shard):
            raise CheckpointError(
                f"{path}: {name} has {prod(place.shape)} elements of {place.dtype}, the manifest says"
                f" {_numel(shard)} of {entry.dtype}; {_REMEDY}"
            )
        try:
            for first in range(0, values.numel(), _HASHED_ELEMENTS):
                piece = values[first : first + _HASHED_ELEMENTS]
                self._files[shard.file].fill(piece, shard.key, low + first)
                if digest is not None and self.verify_hashes:
                    self._hashed = self._hashing.submit(digest.update, tensor_bytes(piece))
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error}); {_REMEDY}") from error
        whole = digest is not None and self.verify_hashes and low + values.numel() == _numel(shard)
        if whole and self._hashed is not None:
            self._hashed.result()
        if whole and digest.hexdigest() != shard.sha256:
            raise CheckpointError(
                f"{path}: the bytes of {name} are not those that were written ({shard.key}, bytes {place.start} to"
                f" {place.stop} of the file: sha256 differs); {_REMEDY}"
            )

    def _place(self, name: str, shard: Shard) -> HeaderEntry:
        """Where a shard lies in its file, which is opened for `name` if it was not before."""
        path = own_file(self.checkpoint, shard.file)
        try:
            if shard.file not in self._files:
                self._files[shard.file] = _opened(path, self.manifest.files[shard.file])
            if shard.key not in self._files[shard.file].header:
                raise ValueError(f"it has no {shard.key}")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error}); {_REMEDY}") from error
        return self._files[shard.file].header[shard.key]


def _opened(path: Path, expected_bytes: int) -> RegionReader:
    found_bytes = path.stat().st_size
    cut = f"the file has {found_bytes} bytes instead of {expected_bytes}"
    try:
        header = read_header(path)
    except ValueError as error:
        raise ValueError(f"{cut}; {error}" if found_bytes != expected_bytes else str(error)) from error
    if found_bytes != expected_bytes:
        raise ValueError(cut)
    return RegionReader(path, header)


def _overlapping(shards: Iterable[Shard], start: int, values: Tensor) -> Iterator[tuple[Shard, int, Tensor]]:
    """The shards of a box that have some of its flattened elements from `start` on, as many as `values` has.

    With each: the first of its own elements that is wanted, and where they go.
    """
    for shard in shards:
        low, high = max(start, shard.run[0]), min(start + values.numel(), shard.run[1])
        if low < high:
            yield shard, low - shard.run[0], values[low - start : high - start]


def _numel(shard: Shard) -> int:
    start, stop = shard.run
    return stop - start
