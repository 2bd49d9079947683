"""Draft: a checkpoint in the making. It lists what each rank writes, writes that rank's file, publishes the whole."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT, Manifest, PackedShards, Shard, TensorEntry
from megalite.checkpoint.publish import publish
from megalite.checkpoint.regions import PartRange, split_flat_range
from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.errors import CheckpointError
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import OptimizerState, StateShard


@dataclass(frozen=True)
class StoredPiece:
    """The values that one rank writes under one key: a flat range of one canonical tensor, of one state key."""

    state_key: str
    part_range: PartRange
    values: Tensor

    @property
    def whole(self) -> bool:
        return self.part_range.numel == self.part_range.region.numel

    @property
    def key(self) -> str:
        return f"{self.state_key}/{self.part_range.part.name}" + (
            "" if self.whole else f"@{self.part_range.start}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part_range.region.shape if self.whole else (self.part_range.numel,)

    @property
    def shaped(self) -> Tensor:
        return self.values.view(self.shape)


class Draft:
    """A checkpoint in the making: what this rank writes, and on rank 0 how the whole is published.

    partial: the folder that the ranks write to. published: the name of that folder once it is complete.
    """

    def __init__(
        self,
        partial: Path,
        published: Path,
        rank: int,
        pieces: Mapping[str, StoredPiece],
        manifest: Manifest,
    ):
        """manifest: without tensors and files; `publish` takes these from the tables of all ranks."""
        self.partial, self.published = partial, published
        self.path = partial / f"rank-{rank:05d}.safetensors"
        self._pieces, self._manifest = pieces, manifest

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(piece.values.nbytes for piece in self._pieces.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Key -> the tensor that this rank writes under it: a view of the live state, not a copy."""
        return {key: piece.shaped for key, piece in self._pieces.items()}

    def write(self, read: Callable[[str], Tensor]) -> str:
        """Write this rank's file, wait until it is on the disk, and return its table of shards for `publish`.

        read: returns the tensor of a key, live or copied; called once a key, in order.
        """
        return _write(self.path, self._pieces, read)

    def publish(self, tables: Sequence[str]) -> None:
        """On one rank, with the tables of all: check that nothing is missing, then rename the folder."""
        publish(replace(self._manifest, **merged_tables(tables)), self.partial, self.published)


def pieces_of(replica: Replica, optimizer: OptimizerState) -> Iterator[StoredPiece]:
    """Everything that this rank has to write."""
    mesh, weights = replica.mesh, optimizer.weights()
    if weights is None:
        weights = _whole_weights(replica, replica.trained)
    for shard in chain(weights, _whole_weights(replica, replica.counted), optimizer.shards()):
        if shard.owned:
            ranges = split_flat_range(mesh.slices(shard.parameter), shard.start, shard.values.numel())
            for part_range in _written(mesh, shard.parameter, ranges):
                values = shard.values[part_range.offset : part_range.offset + part_range.numel]
                yield StoredPiece(shard.key, part_range, values)


def by_key(pieces: Iterable[StoredPiece]) -> dict[str, StoredPiece]:
    pieces_by_key: dict[str, StoredPiece] = {}
    for piece in pieces:
        if pieces_by_key.setdefault(piece.key, piece) is not piece:
            raise AssertionError("a rank holds the same flat range of the same tensor twice")
    return pieces_by_key


def _whole_weights(replica: Replica, parameters: Iterable[Parameter]) -> Iterator[StateShard]:
    """Weights of this rank; the ranks with the same ones take turns to write them."""
    tensors = replica.tensors
    for turn, parameter in enumerate(parameters):
        values = tensors[parameter.name].detach().reshape(-1)
        yield StateShard(parameter, WEIGHT, 0, values, replica.mesh.writes(parameter, turn))


def _written(mesh: ParallelMesh, parameter: Parameter, ranges: Iterable[PartRange]) -> Iterator[PartRange]:
    """The flat ranges that this rank of those over which the parameter is cut writes: replicas and tied copies once."""
    if mesh.is_first_stage(parameter):
        yield from (part_range for part_range in ranges if mesh.is_first_holder(parameter, part_range.part))


class ShardRow(NamedTuple):
    """A shard of a rank's file as rank 0 receives it: a JSON list, since field names of all shards fill its memory."""

    state_key: str
    name: str
    full_shape: Sequence[int]
    dtype: str
    key: str
    offsets: Sequence[int]
    shape: Sequence[int]
    flat: Sequence[int] | None
    sha256: str


def file_table(file: str, size_bytes: int | None, rows: Sequence[ShardRow]) -> str:
    """Return the manifest's part about one rank's file as JSON. size_bytes: None for a rank that writes no file."""
    return json.dumps([file, size_bytes, rows], separators=(",", ":"))


def _write(path: Path, by_key: Mapping[str, StoredPiece], read: Callable[[str], Tensor]) -> str:
    """Write one rank's file; returns what the manifest has to say of it, as JSON."""
    if not by_key:
        return file_table(path.name, None, [])
    infos = {key: TensorInfo(piece.values.dtype, piece.shape) for key, piece in by_key.items()}
    hashes, size_bytes = write_tensor_file(path, infos, read)
    rows = [
        ShardRow(
            piece.state_key,
            piece.part_range.part.name,
            piece.part_range.part.shape,
            dtype_name(piece.values.dtype),
            key,
            piece.part_range.region.offsets,
            piece.part_range.region.shape,
            None if piece.whole else (piece.part_range.start, piece.part_range.stop),
            hashes[key],
        )
        for key, piece in by_key.items()
    ]
    return file_table(path.name, size_bytes, rows)


def merged_tables(tables: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's `tensors` and `files` from the tables of all ranks."""
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, TensorEntry]] = {WEIGHT: {}}
    packed: dict[tuple[str, str], PackedShards] = {}
    regions: dict[TensorSlice, TensorSlice] = {}
    for file, size_bytes, rows in map(json.loads, tables):
        if size_bytes is not None:
            files[file] = size_bytes
        for row in map(ShardRow._make, rows):
            entries = tensors.setdefault(row.state_key, {})
            if (known := entries.get(row.name)) is None:
                shards = packed[row.state_key, row.name] = PackedShards()
                known = entries[row.name] = TensorEntry(tuple(row.full_shape), row.dtype, shards)
            if known.dtype != row.dtype:
                raise CheckpointError(f"ranks hold {row.name} as {known.dtype} and as {row.dtype}")
            flat = None if row.flat is None else (row.flat[0], row.flat[1])
            shard = Shard(file, row.key, tuple(row.offsets), tuple(row.shape), flat, row.sha256)
            packed[row.state_key, row.name].append(shard, regions)
    return {"tensors": tensors, "files": files}
