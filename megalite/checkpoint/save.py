"""Writing a checkpoint: every rank its own file, one manifest, published whole or not at all."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.durable import sync_folder, write_durably
from megalite.checkpoint.folder import check_files, partial_name, published_name
from megalite.checkpoint.format import (
    MANIFEST,
    WEIGHT,
    Manifest,
    TensorEntry,
    check_coverage,
    shard_from_json,
    to_json,
)
from megalite.checkpoint.publish import publish, remove_stale
from megalite.checkpoint.regions import PartRange, split_flat_range
from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.errors import CheckpointError
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.parameters import Parameter
from megalite.topology.state import OptimizerState, StateShard
from megalite.version import __version__


@dataclass(frozen=True)
class Remedies:
    """Remedies for a full disk and for a folder that refuses files, in the settings of the command that saves."""

    full: str
    forbidden: str


OF_A_RUN = Remedies(
    full="free space there, set checkpoint.keep_last to keep fewer, or set run.folder to another disk, then run again"
    " to resume",
    forbidden="make it writable or set run.folder to a folder that is, then run again to resume",
)


@dataclass(frozen=True)
class _Piece:
    """The values that one rank writes under one key: a flat range of one canonical tensor, of one state key."""

    state_key: str
    part_range: PartRange
    values: Tensor

    @property
    def whole(self) -> bool:
        return self.part_range.numel == self.part_range.box.numel

    @property
    def key(self) -> str:
        return f"{self.state_key}/{self.part_range.part.name}" + (
            "" if self.whole else f"@{self.part_range.start}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part_range.box.shape if self.whole else (self.part_range.numel,)

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
        pieces: Mapping[str, _Piece],
        manifest: Manifest,
        remedies: Remedies,
    ):
        """manifest: without tensors and files; `publish` takes these from the tables of all ranks."""
        self.partial, self.published = partial, published
        self.path = partial / f"rank-{rank:05d}.safetensors"
        self._pieces, self._manifest, self.remedies = pieces, manifest, remedies

    @property
    def step(self) -> int:
        return self._manifest.trainer_state["step"]

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
        manifest = replace(self._manifest, **_merge(tables))
        check_coverage(manifest, self.partial)
        check_files(manifest, self.partial)
        write_durably(self.partial / MANIFEST, to_json(manifest))
        sync_folder(self.partial)
        publish(self.partial, self.published)


def save_checkpoint(
    folder: Path,
    replica: Replica,
    optimizer: OptimizerState,
    *,
    trainer_state: Mapping[str, int],
    config: Mapping[str, Any],
    remedies: Remedies = OF_A_RUN,
) -> Path:
    """Write `folder`/step-NNNNNN and make `latest` name it; collective over the world, which shares it.

    trainer_state: at least step, samples and tokens. Each element is written by exactly one rank: weights by
    the data-parallel ranks in turn, optimizer state by its owner, what several tp ranks hold by the first of
    them, tied tensors by their first stage. Raises CheckpointError, on every rank alike, when any rank fails;
    older checkpoints stay as they were.
    """
    draft = draft_checkpoint(
        folder, replica, optimizer, trainer_state=trainer_state, config=config, remedies=remedies
    )
    write_draft(draft, replica.mesh)
    return draft.published


def write_draft(draft: Draft, mesh: ParallelMesh, then: Callable[[], None] = lambda: None) -> None:
    """Write and publish a draft; rank 0 then calls `then`. Collective; raises as `save_checkpoint` does."""

    def finish(tables: Sequence[str]) -> None:
        draft.publish(tables)
        then()

    try:
        write = partial(draft.write, draft.tensors.__getitem__)
        table = all_or_none(mesh, write, explain(mesh, "write", draft.path, draft.remedies))
        tables = mesh.gather_objects(table)
        last = (lambda: None) if tables is None else partial(finish, tables)
        all_or_none(mesh, last, explain(mesh, "publish", draft.partial, draft.remedies))
    except CheckpointError:
        if mesh.rank == 0:
            remove_stale(draft.partial.parent)
        raise


def draft_checkpoint(
    folder: Path,
    replica: Replica,
    optimizer: OptimizerState,
    *,
    trainer_state: Mapping[str, int],
    config: Mapping[str, Any],
    remedies: Remedies = OF_A_RUN,
) -> Draft:
    """List what each rank has to write, and make the partial folder if the disk has room for all ranks.

    Writes no tensor: `write_draft` or a BackgroundWriter does. Arguments, errors: as of `save_checkpoint`. Collective.
    """
    step, mesh, split = trainer_state["step"], replica.mesh, replica.split
    manifest = Manifest(
        megalite=__version__,
        torch=torch.__version__,
        trainer_state=dict(trainer_state),
        layout=mesh.layout,
        stage_layers=tuple(split.layers_of(stage) for stage in range(split.stages)),
        model=replica.shape,
        config=config,
        optimizer=dict(optimizer.scalars()),
        tensors={},
        files={},
    )
    pieces = all_or_none(mesh, lambda: _by_key(_pieces(replica, optimizer)), explain(mesh, "list", folder))
    where = folder / mesh.broadcast_object(partial_name(step, secrets.token_hex(4)))
    draft = Draft(where, folder / published_name(step), mesh.rank, pieces, manifest, remedies)
    sizes = mesh.gather_objects(draft.size_bytes)
    make = partial(_prepare, folder, where, sum(sizes or []), remedies)
    prepare = explain(mesh, "prepare", folder, remedies)
    all_or_none(mesh, lambda: make() if mesh.rank == 0 else None, prepare)
    return draft


def explain(
    mesh: ParallelMesh, verb: str, path: Path, remedies: Remedies = OF_A_RUN
) -> Callable[[Exception], str]:
    """For `all_or_none`: the message that says which rank could not do what, why, and what to do."""

    def message(error: Exception) -> str:
        return f"{mesh.layout.describe(mesh.rank)} could not {verb} {path}: {_reason(error, remedies)}"

    return message


def _reason(error: Exception, remedies: Remedies) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}; {remedies.full}"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error}; {remedies.forbidden}"
    return f"{type(error).__name__}: {error}"


def _prepare(folder: Path, partial: Path, needed_bytes: int, remedies: Remedies) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{os.strerror(errno.ENOSPC)}: the checkpoint has {needed_bytes:,} bytes, and {free_bytes:,} are free; "
            f"{remedies.full}"
        )
    partial.mkdir()


def _pieces(replica: Replica, optimizer: OptimizerState) -> Iterator[_Piece]:
    """Everything that this rank has to write."""
    mesh, weights = replica.mesh, optimizer.weights()
    if weights is None:
        weights = _whole_weights(replica)
    for shard in chain(weights, optimizer.shards()):
        if shard.owned:
            boxes = shard.parameter.spec.boxes(mesh.tp.rank, mesh.tp.size)
            ranges = split_flat_range(boxes, shard.start, shard.values.numel())
            for each in _written(mesh, shard.parameter, ranges):
                yield _Piece(shard.key, each, shard.values[each.offset : each.offset + each.numel])


def _by_key(pieces: Iterable[_Piece]) -> dict[str, _Piece]:
    found: dict[str, _Piece] = {}
    for piece in pieces:
        if found.setdefault(piece.key, piece) is not piece:
            raise AssertionError("a rank holds the same flat range of the same tensor twice")
    return found


def _whole_weights(replica: Replica) -> Iterator[StateShard]:
    """The weights that every data-parallel rank holds; the ranks take turns to write them."""
    copies, tensors = replica.mesh.dense_gradients, replica.tensors
    for index, parameter in enumerate(replica.parameters):
        owned = index % copies.size == copies.rank
        yield StateShard(parameter, WEIGHT, 0, tensors[parameter.name].detach().reshape(-1), owned)


def _written(mesh: ParallelMesh, parameter: Parameter, ranges: Iterable[PartRange]) -> Iterator[PartRange]:
    """The flat ranges that this tensor-parallel rank and stage write: replicas and tied copies only once."""
    spec, (rank, size) = parameter.spec, (mesh.tp.rank, mesh.tp.size)
    if not spec.stages or mesh.at.pp == spec.stages[0]:
        yield from (each for each in ranges if spec.first_holder(each.part, rank, size) == rank)


def _write(path: Path, by_key: Mapping[str, _Piece], read: Callable[[str], Tensor]) -> str:
    """Write one rank's file; returns what the manifest has to say of it, as JSON."""
    if not by_key:
        return json.dumps({"file": path.name, "size_bytes": None, "shards": []})
    infos = {key: TensorInfo(piece.values.dtype, piece.shape) for key, piece in by_key.items()}
    hashes, size_bytes = write_tensor_file(path, infos, read)
    shards = [
        {
            "state_key": piece.state_key,
            "name": piece.part_range.part.name,
            "full_shape": piece.part_range.part.shape,
            "dtype": dtype_name(piece.values.dtype),
            "shard": {
                "key": key,
                "offsets": piece.part_range.box.offsets,
                "shape": piece.part_range.box.shape,
                "flat": None if piece.whole else (piece.part_range.start, piece.part_range.stop),
                "sha256": hashes[key],
            },
        }
        for key, piece in by_key.items()
    ]
    return json.dumps({"file": path.name, "size_bytes": size_bytes, "shards": shards})


def _merge(tables: Sequence[str]) -> dict[str, Any]:
    """The manifest's `tensors` and `files` from the tables of all ranks."""
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, TensorEntry]] = {WEIGHT: {}}
    for table in map(json.loads, tables):
        if table["size_bytes"] is not None:
            files[table["file"]] = table["size_bytes"]
        for row in table["shards"]:
            entries = tensors.setdefault(row["state_key"], {})
            known = entries.get(row["name"], TensorEntry(tuple(row["full_shape"]), row["dtype"], ()))
            if known.dtype != row["dtype"]:
                raise CheckpointError(f"ranks hold {row['name']} as {known.dtype} and as {row['dtype']}")
            shard = shard_from_json({"file": table["file"], **row["shard"]})
            entries[row["name"]] = TensorEntry(known.shape, known.dtype, (*known.shards, shard))
    return {"tensors": tensors, "files": files}
