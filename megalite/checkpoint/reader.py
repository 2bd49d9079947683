"""Read any region of any tensor of a checkpoint, checked against its manifest and hashes."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.coverage import check_sizes
from megalite.checkpoint.folder import own_file, read_manifest
from megalite.checkpoint.manifest import WEIGHT, Manifest, Shard, TensorEntry
from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.regions import full_slice, index_in, intersection, rows_of
from megalite.checkpoint.tensor_file import DTYPES, tensor_bytes
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.errors import CheckpointError
from megalite.topology.sharding import TensorSlice

BLOCK_ELEMENTS = 4 << 20
"""Elements per block where a tensor is read in blocks of rows."""
# A piece of this size is hashed in a thread while the next one is read.
_HASHED_ELEMENTS = 1 << 18
_REMEDY = "use another checkpoint"


class CheckpointReader:
    """Reads regions of a checkpoint's tensors, for any layout that wrote it; opens only the files it needs.

    Reading raises CheckpointError with file and tensor if a file is missing, truncated or altered.
    """

    def __init__(self, checkpoint: Path, *, verify_hashes: bool = True, weights: str = WEIGHT):
        """weights: the state key to read as the weights. Raises CheckpointError if the checkpoint lacks it."""
        self.checkpoint, self.verify_hashes, self.weights = checkpoint, verify_hashes, weights
        self.manifest: Manifest = read_manifest(checkpoint)
        if weights not in self.manifest.tensors:
            raise CheckpointError(f"{checkpoint} has no {weights}; it has {', '.join(self.manifest.tensors)}")
        check_sizes(self.manifest, checkpoint)
        self._files: dict[str, RegionReader] = {}
        # One thread, because a hash needs the bytes in order.
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

    def read(
        self, state_key: str, name: str, region: TensorSlice, flat_range: tuple[int, int] | None = None
    ) -> Tensor:
        """Return `region` of a tensor, in its shape; with `flat_range`, that range of the flattened region."""
        entry = self._entry(state_key, name)
        start, stop = flat_range or (0, region.numel)
        exact = [shard for shard in entry.shards if shard.region == region]
        if exact:
            values = self._flat_ranges(name, entry, exact, start, stop)
        else:
            values = self._assemble(name, entry, region).view(-1)[start:stop]
        return values if flat_range else values.view(region.shape)

    def blocks(self, state_key: str, name: str) -> Iterator[Tensor]:
        """Yield a whole tensor in blocks of consecutive rows; each byte is read and hashed once."""
        entry = self._entry(state_key, name)
        self._require_files(name, entry.shards)
        digests = {shard: hashlib.sha256() for shard in entry.shards}
        for block in rows_of(full_slice(entry.shape), BLOCK_ELEMENTS):
            values = torch.empty(block.shape, dtype=DTYPES[entry.dtype])
            for source, shards in entry.by_slice().items():
                if overlap := intersection(source, block):
                    # Rows of the source region are contiguous in its shards, so these are read sequentially.
                    start = (overlap.offsets[0] - source.offsets[0]) * prod(source.shape[1:])
                    held = torch.empty(overlap.shape, dtype=values.dtype)
                    for shard, low, target in _overlapping(shards, start, held.view(-1)):
                        self._fill(name, entry, shard, low, target, digests[shard])
                    values[index_in(overlap, block)] = held
            yield values

    def read_all(self) -> None:
        """Read every shard once, to check the hashes: files of the right size may still hold altered bytes."""
        for entries in self.manifest.tensors.values():
            for name, entry in entries.items():
                for shard in entry.shards:
                    self._shard(name, entry, shard)

    def _entry(self, state_key: str, name: str) -> TensorEntry:
        return self.manifest.tensors[self.weights if state_key == WEIGHT else state_key][name]

    def _flat_ranges(
        self, name: str, entry: TensorEntry, shards: Iterable[Shard], start: int, stop: int
    ) -> Tensor:
        """Return elements start to stop of a flattened region from the shards of that region."""
        held = [shard for shard in shards if max(start, shard.flat_range[0]) < min(stop, shard.flat_range[1])]
        self._require_files(name, held)
        values = torch.empty(stop - start, dtype=DTYPES[entry.dtype])
        for shard, low, target in _overlapping(held, start, values):
            if not self.verify_hashes:
                self._fill(name, entry, shard, low, target)
            elif target.numel() == _numel(shard):
                self._fill(name, entry, shard, 0, target, hashlib.sha256())
            else:  # the hash covers the whole shard
                target.copy_(self._shard(name, entry, shard)[low : low + target.numel()])
        return values

    def _assemble(self, name: str, entry: TensorEntry, region: TensorSlice) -> Tensor:
        """Return `region`, assembled from all stored regions that overlap it."""
        groups = {
            source: shards for source, shards in entry.by_slice().items() if intersection(source, region)
        }
        self._require_files(name, [shard for shards in groups.values() for shard in shards])
        values = torch.empty(region.shape, dtype=DTYPES[entry.dtype])
        for source, shards in groups.items():
            overlap = intersection(source, region)
            assert overlap is not None
            held = self._flat_ranges(name, entry, shards, 0, source.numel).view(source.shape)
            values[index_in(overlap, region)] = held[index_in(overlap, source)]
        return values

    def _require_files(self, name: str, shards: Iterable[Shard]) -> None:
        """Raise CheckpointError unless all shards are in their files, before memory of the manifest's size is used."""
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
        """Fill `values` with a shard's elements from index `low` on.

        digest: sha256 of the elements before `low`; after the shard's last element it is compared with the manifest's,
        unless hashes are not verified.
        """
        path, place = self.checkpoint / shard.file, self._place(name, shard)
        if TYPES.get(place.dtype) != DTYPES[entry.dtype] or prod(place.shape) != _numel(shard):
            raise CheckpointError(
                f"{path}: {name} has {prod(place.shape)} elements of {place.dtype}, but the manifest says"
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
        """Return the header entry of a shard, opening its file if necessary. Raises CheckpointError."""
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
    """Yield the shards that overlap elements `start` to `start + values.numel()` of their flattened region.

    With each shard: the index of its first element in that range, and the slice of `values` to fill.
    """
    for shard in shards:
        first, stop = shard.flat_range
        low, high = max(start, first), min(start + values.numel(), stop)
        if low < high:
            yield shard, low - first, values[low - start : high - start]


def _numel(shard: Shard) -> int:
    start, stop = shard.flat_range
    return stop - start
