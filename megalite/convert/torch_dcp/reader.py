"""Read tensors and objects of a torch.distributed.checkpoint folder by name and region, without a process group."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.regions import contains, index_in, intersection
from megalite.convert.foreign.unpickle import load_pickled_bytes
from megalite.convert.torch_dcp.metadata import (
    DcpMetadata,
    FileRange,
    StoredChunk,
    StoredTensor,
    read_metadata,
)
from megalite.errors import CheckpointError, listed
from megalite.topology.sharding import TensorSlice


class DcpFolder:
    """The entries of a folder. No file stays open; a read loads the chunks that it needs, and keeps the last one."""

    def __init__(self, path: Path):
        """Read the metadata; raises CheckpointError as `read_metadata` does."""
        self.path = path
        self.metadata: DcpMetadata = read_metadata(path)
        self._last: tuple[FileRange, Any] | None = None

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Name -> shape, dtype and chunks."""
        return dict(self.metadata.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.distcp"))

    def require_whole(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless these tensors are stored and the chunks of each hold each element once."""
        names = list(names)
        if missing := [name for name in names if name not in self.metadata.tensors]:
            raise CheckpointError(f"{self.path} lacks {listed(missing)}; fetch or write the checkpoint again")
        for name in names:
            if (reason := self.metadata.tensors[name].gap()) is not None:
                raise CheckpointError(
                    f"{self.path}: {name} is not whole: {reason}; save the checkpoint again"
                )

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a tensor in its stored dtype, from only the chunks that overlap with it.

        Raises CheckpointError for a damaged chunk, or where no chunk has some of the region.
        """
        tensor = self.metadata.tensors[name]
        if not contains(tensor.shape, region):
            raise CheckpointError(f"{self.path}: {name} of shape {tensor.shape} has no region {region}")
        overlaps = [(chunk, intersection(chunk.region, region)) for chunk in tensor.chunks]
        parts = [(chunk, shared) for chunk, shared in overlaps if shared is not None]
        if len(parts) == 1 and parts[0][1] == region:
            return self._chunk(tensor, parts[0][0])[index_in(region, parts[0][0].region)]
        if sum(shared.numel for _, shared in parts) != region.numel:
            raise CheckpointError(
                f"{self.path}: the chunks of {name} do not hold each element of {region} once"
            )
        values = torch.empty(region.shape, dtype=tensor.dtype)
        for chunk, shared in parts:
            values[index_in(shared, region)] = self._chunk(tensor, chunk)[index_in(shared, chunk.region)]
        return values

    def object(self, name: str) -> Any:
        """Return an entry that is no tensor: plain values, tensors, and a Foreign for each object of a class."""
        return self._load(self.metadata.objects[name], name)

    def _chunk(self, tensor: StoredTensor, chunk: StoredChunk) -> Tensor:
        if self._last is None or self._last[0] != chunk.bytes:
            self._last = None  # before the next one is loaded
            self._last = (chunk.bytes, self._load(chunk.bytes, tensor.name))
        values = self._last[1]  # which may have been loaded for another tensor that is said to be there too
        if (
            not isinstance(values, Tensor)
            or values.layout != torch.strided
            or (tuple(values.shape), values.dtype) != (chunk.region.shape, tensor.dtype)
        ):
            raise CheckpointError(
                f"{chunk.bytes.file}: the chunk of {tensor.name} at {chunk.region.offsets} is not the"
                f" {tensor.dtype} tensor of {chunk.region.shape} that .metadata promises; fetch it again"
            )
        return values

    def _load(self, place: FileRange, name: str) -> Any:
        try:
            with place.file.open("rb") as file:
                return load_pickled_bytes(
                    io.BufferedReader(_RangeOfFile(file, place)), f"{place.file}: {name}"
                )
        except OSError as error:
            raise CheckpointError(f"{place.file} cannot be read: {error}") from error


class _RangeOfFile(io.RawIOBase):
    """The bytes of one entry as a file of its own, read as they are asked for."""

    def __init__(self, file: io.BufferedReader, place: FileRange):
        self._file, self._start, self._length, self._at = file, place.offset, place.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[:count])
        self._at += count
        return count
