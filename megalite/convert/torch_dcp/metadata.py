"""Read and check the `.metadata` of a torch.distributed.checkpoint folder: names, shapes, and where the bytes are.

Source of the format: torch/distributed/checkpoint/metadata.py and filesystem.py (FileSystemWriter).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch

from megalite.checkpoint.regions import contains, intersection
from megalite.convert.foreign.plain_pickle import load_plain_pickle, stand_ins
from megalite.convert.foreign.unpickle import Foreign
from megalite.convert.torch_dcp.folder import METADATA
from megalite.errors import CheckpointError, listed
from megalite.topology.sharding import TensorSlice

_MODULE = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES = f"{_MODULE}.TensorStorageMetadata", f"{_MODULE}.BytesStorageMetadata"
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_NAMES = stand_ins(
    *(f"{_MODULE}.{name}" for name in (*_CLASSES, "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    *("torch.Size", "torch.serialization._get_layout"),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
    # megatron-core keeps the plans of all ranks beside it, which are not read.
    *(f"torch.distributed.checkpoint.planner.{name}" for name in _PLANS),
    *(_MCORE_METADATA, "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"),
)
_MOST_DIMS = 64


@dataclass(frozen=True)
class FileRange:
    """The bytes of one entry: a complete file of torch.save within `file`."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """A region of a tensor, and the bytes that hold it as a tensor of the region's shape."""

    region: TensorSlice
    bytes: FileRange


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the folder. chunks: in the order of the metadata, each region once, inside of the tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    def gap(self) -> str | None:
        """Return what is wrong with the chunks as a partition of the tensor; None if each element stands in one."""
        stored, full = sum(chunk.region.numel for chunk in self.chunks), prod(self.shape)
        if (pair := next(self._overlaps(), None)) is not None:
            first, second = (f"{chunk.region.offsets} of {chunk.region.shape}" for chunk in pair)
            return f"its chunks at {first} and at {second} overlap"
        return None if stored == full else f"its chunks have {stored:,} of its {full:,} elements"

    def _overlaps(self) -> Iterator[tuple[StoredChunk, StoredChunk]]:
        """Sweep along the dim that is cut most; only chunks that meet there are compared."""
        chunks = [chunk for chunk in self.chunks if chunk.region.numel]
        dims = range(len(self.shape))
        if not dims:  # one region is possible, and none is listed twice
            return
        dim = max(dims, key=lambda dim: len({chunk.region.offsets[dim] for chunk in chunks}))
        open_chunks: list[StoredChunk] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.region.offsets[dim]):
            start = chunk.region.offsets[dim]
            open_chunks = [x for x in open_chunks if x.region.offsets[dim] + x.region.shape[dim] > start]
            yield from ((x, chunk) for x in open_chunks if intersection(x.region, chunk.region) is not None)
            open_chunks.append(chunk)


@dataclass(frozen=True)
class DcpMetadata:
    """The content of `.metadata`, checked against the folder's files.

    objects: name -> bytes of an entry that is no tensor. fields: of the Metadata object, as other programs add some.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, FileRange]
    fields: Mapping[str, Any]


def read_metadata(folder: Path) -> DcpMetadata:
    """Read a folder's `.metadata`.

    Raises CheckpointError if it is damaged, names anything that is not data, a file outside of the folder or absent,
    bytes beyond a file's end, or sizes that the bytes cannot hold.
    """
    path = folder / METADATA
    content = load_plain_pickle(path, _NAMES)
    is_mcore = isinstance(content, Foreign) and content.type_name == _MCORE_METADATA
    fields = _fields(content, _MCORE_METADATA if is_mcore else f"{_MODULE}.Metadata", path)
    entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise _bad(path, "it lists no entries or no files")
    ranges = _ranges(storage, folder)
    tensors, objects = {}, {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, Foreign):
            raise _bad(path, f"the entry {_shown(name)} is neither a tensor nor an object")
        if entry.type_name == _TENSOR:
            tensors[name] = _tensor(name, entry, ranges, path)
        elif (name, None) not in ranges:
            raise _bad(path, f"it does not say where {name} is stored")
        elif entry.type_name == _BYTES:
            objects[name] = ranges[name, None]
        else:
            raise _bad(path, f"{name} is a {entry.type_name}")
    return DcpMetadata(folder, tensors, objects, fields)


def _ranges(storage: Mapping[Any, Any], folder: Path) -> dict[tuple[str, tuple[int, ...] | None], FileRange]:
    """Return (name, offsets or None) -> bytes; every range lies in a file of the folder."""
    path = folder / METADATA
    sizes: dict[str, int] = {}
    ranges: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
    absent: set[str] = set()
    for index, info in storage.items():
        key = _fields(index, f"{_MODULE}.MetadataIndex", path)
        name, offset = key.get("fqn"), key.get("offset")
        where = _fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo", path)
        file, start, length = (where.get(field) for field in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and _is_count(start) and _is_count(length)):
            raise _bad(path, f"the place of {_shown(name)} is no offset and length")
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file or "\0" in file:
            raise _bad(
                path, f"{name} is said to be in {_shown(file)}, which is not the name of a file in the folder"
            )
        if where.get("transform_descriptors"):
            raise _bad(
                path,
                f"{name} was saved with a transform; save it without",
            )
        if file not in sizes:
            sizes[file] = (folder / file).stat().st_size if (folder / file).is_file() else -1
        if sizes[file] < 0:
            absent.add(file)
        elif start + length > sizes[file]:
            raise CheckpointError(
                f"{folder / file} has {sizes[file]:,} bytes, but {name} is said to end at byte {start + length:,};"
                " the file is cut short, fetch it again"
            )
        ranges[name, None if offset is None else _size(offset, path)] = FileRange(
            folder / file, start, length
        )
    if absent:
        raise CheckpointError(f"{folder} lacks {listed(sorted(absent))}; fetch every file of the checkpoint")
    return ranges


def _tensor(
    name: str, entry: Foreign, ranges: Mapping[tuple[str, tuple[int, ...] | None], FileRange], path: Path
) -> StoredTensor:
    properties = _fields(entry.fields.get("properties"), f"{_MODULE}.TensorProperties", path, or_state=True)
    dtype, shape = properties.get("dtype"), _size(entry.fields.get("size"), path)
    chunks = entry.fields.get("chunks")
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
        raise _bad(path, f"{name} has no dtype or no chunks")
    stored: dict[TensorSlice, StoredChunk] = {}
    for chunk in chunks:
        fields = _fields(chunk, f"{_MODULE}.ChunkStorageMetadata", path)
        region = TensorSlice(_size(fields.get("offsets"), path), _size(fields.get("sizes"), path))
        if not contains(shape, region):
            raise _bad(path, f"{name} has shape {shape}, but a chunk of {region.shape} at {region.offsets}")
        place = ranges.get((name, region.offsets))
        if place is None:
            raise _bad(path, f"it does not say where the chunk of {name} at {region.offsets} is stored")
        if region.numel * dtype.itemsize > place.length:
            raise _bad(path, f"a chunk of {name} of {region.shape} is said to be in {place.length:,} bytes")
        stored[region] = StoredChunk(region, place)
    return StoredTensor(name, shape, dtype, tuple(stored.values()))


def _fields(value: object, type_name: str, path: Path, *, or_state: bool = False) -> dict[str, Any]:
    """Return the attributes of a stand-in of this class; or_state: TensorProperties are pickled as a tuple."""
    if not isinstance(value, Foreign) or value.type_name != type_name:
        raise _bad(path, f"{_shown(value)} is no {type_name.rpartition('.')[2]}")
    if or_state and isinstance(value.state, tuple) and value.state:
        return {"dtype": value.state[0]}
    return value.fields


def _size(value: object, path: Path) -> tuple[int, ...]:
    inner = value.arguments[0] if isinstance(value, Foreign) and len(value.arguments) == 1 else value
    sizes = tuple(inner) if isinstance(inner, tuple | list) else None
    if sizes is None or len(sizes) > _MOST_DIMS or not all(map(_is_count, sizes)):
        raise _bad(path, f"{_shown(value)} is no size")
    return sizes


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _shown(value: object) -> str:
    """Return a value for an error; not its repr, which a hostile file can make endless."""
    if isinstance(value, str):
        return repr(value[:100])
    return value.type_name if isinstance(value, Foreign) else f"a {type(value).__name__}"


def _bad(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: {reason}; fetch or write the checkpoint again")
