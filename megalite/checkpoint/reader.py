"""Read any region of any tensor of a checkpoint, checked against its manifest and hashes."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalite.checkpoint.coverage import check_coverage, check_sizes
from megalite.checkpoint.folder import own_file, read_manifest
from megalite.checkpoint.manifest import WEIGHT, Manifest, Shard, TensorEntry
from megalite.checkpoint.region_reader import TYPES, RegionReader
from megalite.checkpoint.regions import full_slice, index_in, intersection, rows_of
from megalite.checkpoint.tensor_file import DTYPES, tensor_bytes
from megalite.checkpoint.tensor_header import HeaderEntry, read_header
from megalite.checkpoint.weights import BLOCK_ELEMENTS, TensorTarget, WeightReader
from megalite.errors import CheckpointError
from megalite.topology.sharding import TensorSlice

# A piece of this size is hashed, and converted if necessary, while the processor's cache still holds it.
_PIECE_ELEMENTS = 1 << 17
_REMEDY = "use another checkpoint"
# Beyond these a disk is the limit.
_MOST_THREADS = 8

T = TypeVar("T")


class CheckpointReader(WeightReader):
    """Reads regions of a checkpoint's tensors, for any layout that wrote it; opens only the files it needs.

    Reading raises CheckpointError with file and tensor if a file is missing, truncated or altered.
    """

    def __init__(self, checkpoint: Path, *, weights: str | None = WEIGHT):
        """weights: the state key to read as the weights; None: "master" where it exists, otherwise "weight".

        Raises CheckpointError if the checkpoint lacks it or is incomplete.
        """
        self.checkpoint = checkpoint
        self.manifest: Manifest = read_manifest(checkpoint)
        self.weights = weights or self.manifest.exact_weights
        if self.weights not in self.manifest.tensors:
            raise CheckpointError(
                f"{checkpoint} has no {self.weights}; it has {', '.join(self.manifest.tensors)}"
            )
        check_sizes(self.manifest, checkpoint)
        check_coverage(self.manifest, checkpoint)
        self._files: dict[str, RegionReader] = {}
        self._opening = Lock()

    def close(self) -> None:
        for opened in self._files.values():
            opened.close()
        self._files.clear()

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return `region` of a tensor, in its shape."""
        entry = self._entry(state_key, name)
        self._require_files(name, _sources(entry, region, 0, region.numel))
        values = torch.empty(region.numel, dtype=DTYPES[entry.dtype])
        self.fill(TensorTarget(values, state_key, name, region))
        return values.view(region.shape)

    @torch.no_grad()
    def fill(self, target: TensorTarget) -> None:
        """Fill a tensor in place, with no copy in memory where the checkpoint has its region as it is."""
        name, region, start, values = target.name, target.region, target.start, target.values
        entry = self._entry(target.state_key, name)
        shards = _sources(entry, region, start, start + values.numel())
        self._require_files(name, shards)
        if all(shard.region == region for shard in shards):
            self._fill_range(name, entry, shards, start, values)
        else:
            assembled = self._assemble(name, entry, region, shards)
            values.copy_(assembled.view(-1)[start : start + values.numel()])

    def files_of(self, target: TensorTarget) -> set[str]:
        """Return the files that filling a tensor reads."""
        entry, stop = self._entry(target.state_key, target.name), target.start + target.values.numel()
        return {shard.file for shard in _sources(entry, target.region, target.start, stop)}

    def fill_all(self, targets: Iterable[TensorTarget]) -> None:
        """Fill many tensors in several threads; beside them, for each thread, the largest of other regions."""
        self._in_threads(self.fill, list(targets))

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
                    overlap_values = torch.empty(overlap.shape, dtype=values.dtype)
                    for shard, low, target in _overlapping(shards, start, overlap_values.view(-1)):
                        self._fill(name, entry, shard, low, target, digests[shard])
                    values[index_in(overlap, block)] = overlap_values
            yield values

    def read_all(self) -> None:
        """Read every shard once, to check the hashes: files of the right size may still hold altered bytes."""

        def check(shard_of: tuple[str, TensorEntry, Shard]) -> None:
            name, entry, shard = shard_of
            self._fill_checked(name, entry, shard, 0, torch.empty(0, dtype=DTYPES[entry.dtype]))

        tables = self.manifest.tensors.values()
        shards = [
            (name, entry, shard)
            for table in tables
            for name, entry in table.items()
            for shard in entry.shards
        ]
        self._in_threads(check, shards)

    def _in_threads(self, action: Callable[[T], None], items: Iterable[T]) -> None:
        """Call `action` with each item; raises the error of the first item that has one."""
        # Ranks of one machine divide its cores among themselves by torch's threads.
        threads = min(torch.get_num_threads(), _MOST_THREADS)
        with ThreadPoolExecutor(threads, thread_name_prefix="reading") as pool:
            running = [pool.submit(action, item) for item in items]
            try:
                for future in running:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _entry(self, state_key: str, name: str) -> TensorEntry:
        tensors = self.manifest.tensors
        # No optimizer has a master or a mean of what counts change.
        kept = state_key == WEIGHT and name in tensors[self.weights]
        return tensors[self.weights if kept else state_key][name]

    def _fill_range(
        self, name: str, entry: TensorEntry, shards: Iterable[Shard], start: int, values: Tensor
    ) -> None:
        """Fill `values` with the elements from `start` on of a flattened region, from the shards of that region."""
        for shard, low, target in _overlapping(shards, start, values):
            self._fill_checked(name, entry, shard, low, target)

    def _assemble(
        self, name: str, entry: TensorEntry, region: TensorSlice, needed: Sequence[Shard]
    ) -> Tensor:
        """Return `region`, assembled from the stored regions of the needed shards, which overlap it."""
        values = torch.empty(region.shape, dtype=DTYPES[entry.dtype])
        for source, shards in replace(entry, shards=tuple(needed)).by_slice().items():
            overlap = intersection(source, region)
            assert overlap is not None
            source_values = torch.empty(source.shape, dtype=values.dtype)
            self._fill_range(name, entry, shards, 0, source_values.view(-1))
            values[index_in(overlap, region)] = source_values[index_in(overlap, source)]
        return values

    def _require_files(self, name: str, shards: Iterable[Shard]) -> None:
        """Raise CheckpointError unless all shards are in their files, before memory of the manifest's size is used."""
        for shard in shards:
            self._place(name, shard)

    def _fill_checked(self, name: str, entry: TensorEntry, shard: Shard, low: int, values: Tensor) -> None:
        """Fill `values` with a shard's elements from index `low` on; read the others too, since its hash covers all."""
        self._place(name, shard)
        digest, stop = hashlib.sha256(), low + values.numel()
        for first in range(0, low, _PIECE_ELEMENTS):
            self._skip(name, entry, shard, (first, min(first + _PIECE_ELEMENTS, low)), digest)
        self._fill(name, entry, shard, low, values, digest)
        for first in range(stop, _numel(shard), _PIECE_ELEMENTS):
            self._skip(name, entry, shard, (first, min(first + _PIECE_ELEMENTS, _numel(shard))), digest)

    def _skip(
        self, name: str, entry: TensorEntry, shard: Shard, elements: tuple[int, int], digest: Any
    ) -> None:
        """Hash elements of a shard that nothing is filled with."""
        start, stop = elements
        self._fill(name, entry, shard, start, torch.empty(stop - start, dtype=DTYPES[entry.dtype]), digest)

    def _fill(
        self, name: str, entry: TensorEntry, shard: Shard, low: int, values: Tensor, digest: Any
    ) -> None:
        """Fill `values` with a shard's elements from index `low` on.

        digest: sha256 of the elements before `low`; after the shard's last element it is compared with the manifest's.
        """
        path, place = self.checkpoint / shard.file, self._place(name, shard)
        dtype, last = DTYPES[entry.dtype], low + values.numel() == _numel(shard)
        if TYPES.get(place.dtype) != dtype or prod(place.shape) != _numel(shard):
            raise CheckpointError(
                f"{path}: {name} has {prod(place.shape)} elements of {place.dtype}, but the manifest says"
                f" {_numel(shard)} of {entry.dtype}; {_REMEDY}"
            )
        in_place = values.dtype == dtype and values.device.type == "cpu" and values.is_contiguous()
        buffer = None if in_place else torch.empty(min(_PIECE_ELEMENTS, values.numel()), dtype=dtype)
        try:
            for first in range(0, values.numel(), _PIECE_ELEMENTS):
                target = values[first : first + _PIECE_ELEMENTS]
                piece = target if buffer is None else buffer[: target.numel()]
                self._files[shard.file].fill(piece, shard.key, low + first)
                digest.update(tensor_bytes(piece))
                if buffer is not None:
                    target.copy_(piece)
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error}); {_REMEDY}") from error
        if last and digest.hexdigest() != shard.sha256:
            raise CheckpointError(
                f"{path}: the bytes of {name} are not those that were written ({shard.key}, bytes {place.start} to"
                f" {place.stop} of the file: sha256 differs); {_REMEDY}"
            )

    def _place(self, name: str, shard: Shard) -> HeaderEntry:
        """Return the header entry of a shard, opening its file if necessary. Raises CheckpointError."""
        path = own_file(self.checkpoint, shard.file)
        try:
            with self._opening:
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
    reader = RegionReader(path, header)
    reader.open()
    return reader


def _overlapping(shards: Iterable[Shard], start: int, values: Tensor) -> Iterator[tuple[Shard, int, Tensor]]:
    """Yield the shards that overlap elements `start` to `start + values.numel()` of their flattened region.

    With each shard: the index of its first element in that range, and the slice of `values` to fill.
    """
    for shard in shards:
        first, stop = shard.flat_range
        low, high = max(start, first), min(start + values.numel(), stop)
        if low < high:
            yield shard, low - first, values[low - start : high - start]


def _sources(entry: TensorEntry, region: TensorSlice, start: int, stop: int) -> list[Shard]:
    """Return the shards of exactly this region that overlap its range start:stop; without any, all that overlap it."""
    exact = [shard for shard in entry.shards if shard.region == region]
    if exact:
        return [shard for shard in exact if max(start, shard.flat_range[0]) < min(stop, shard.flat_range[1])]
    return [shard for shard in entry.shards if intersection(shard.region, region)]


def _numel(shard: Shard) -> int:
    start, stop = shard.flat_range
    return stop - start
