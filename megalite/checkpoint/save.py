"""Writing a checkpoint: every rank its own file, one manifest, published whole or not at all."""

import errno
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import megalite
from megalite.checkpoint.folder import (
    check_files,
    partial_name,
    publish,
    published_name,
    remove_stale,
    sync_folder,
    write_durably,
)
from megalite.checkpoint.format import (
    MANIFEST,
    WEIGHT,
    Manifest,
    TensorEntry,
    check_coverage,
    shard_from_json,
    to_json,
)
from megalite.checkpoint.regions import PartRun, split_run
from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import PipelineSplit
from megalite.topology.parameters import ModelShape, Parameter, stage_parameters
from megalite.topology.state import OptimizerState, StateShard

T = TypeVar("T")


@dataclass(frozen=True)
class _Piece:
    """What one rank writes under one key: a run of one kind of one canonical tensor."""

    kind: str
    run: PartRun
    values: Tensor

    @property
    def whole(self) -> bool:
        return self.run.numel == self.run.box.numel

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.run.part.name}" + ("" if self.whole else f"@{self.run.start}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.run.box.shape if self.whole else (self.run.numel,)

    @property
    def shaped(self) -> Tensor:
        return self.values.view(self.shape)


def save_checkpoint(
    folder: Path,
    *,
    mesh: ParallelMesh,
    shape: ModelShape,
    split: PipelineSplit,
    stage: nn.Module,
    optimizer: OptimizerState,
    trainer_state: Mapping[str, int],
    config: Mapping[str, Any],
) -> Path:
    """Write `folder`/step-NNNNNN and make `latest` name it; collective over the world, which shares it.

    trainer_state: at least step, samples and tokens. Each element is written by exactly one rank: weights by
    the data-parallel ranks in turn, optimizer state by its owner, replicated tensors by tp rank 0, tied ones
    by their first stage. Raises CheckpointError, on every rank alike, when any rank fails; older checkpoints
    stay as they were.
    """
    step = trainer_state["step"]
    partial = folder / mesh.broadcast_object(partial_name(step, secrets.token_hex(4)))
    try:
        all_or_none(mesh, "prepare", folder, lambda: _prepare(folder, partial) if mesh.rank == 0 else None)
        parameters = list(stage_parameters(shape, split, mesh.at.pp))
        path = partial / f"rank-{mesh.rank:05d}.safetensors"
        table = all_or_none(
            mesh, "write", path, lambda: _write(path, list(_pieces(mesh, parameters, stage, optimizer)))
        )
        tables = mesh.gather_objects(table)

        def complete() -> None:
            manifest = Manifest(
                megalite=megalite.__version__,
                torch=torch.__version__,
                trainer_state=dict(trainer_state),
                layout=mesh.layout,
                stage_layers=tuple(split.layers_of(stage) for stage in range(split.stages)),
                model=shape,
                config=config,
                optimizer=dict(optimizer.scalars()),
                **_merge(tables or []),
            )
            _complete(partial, folder / published_name(step), manifest)

        all_or_none(mesh, "publish", partial, lambda: complete() if mesh.rank == 0 else None)
    except CheckpointError:
        if mesh.rank == 0:
            remove_stale(folder)
        raise
    return folder / published_name(step)


def all_or_none(mesh: ParallelMesh, verb: str, path: Path, action: Callable[[], T]) -> T:
    """Run `action` on every rank; when it fails on one, raise the same CheckpointError on all. Collective."""
    failure, cause, result = None, None, None
    try:
        result = action()
    # Whatever it is: the other ranks would wait for this one for ever.
    except Exception as error:
        cause = error
        failure = f"{mesh.layout.describe(mesh.rank)} could not {verb} {path}: {_explain(error, path)}"
    failures = [text for text in mesh.gather_objects(failure) or [] if text is not None]
    first = mesh.broadcast_object(failures[0] if failures else None)
    if first is not None:
        raise CheckpointError(first) from cause
    return result  # type: ignore[return-value]


def _explain(error: Exception, path: Path) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}; free space there or set run.folder to another disk, then run again to resume"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error}; make it writable or set run.folder to a folder that is, then run again to resume"
    return f"{type(error).__name__}: {error}"


def _prepare(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    partial.mkdir()


def _pieces(
    mesh: ParallelMesh, parameters: Sequence[Parameter], stage: nn.Module, optimizer: OptimizerState
) -> Iterator[_Piece]:
    """Everything that this rank has to write."""
    weights = optimizer.weights()
    if weights is None:
        weights = _whole_weights(mesh, parameters, dict(stage.named_parameters()))
    for shard in chain(weights, optimizer.shards()):
        if shard.owned and _writes(mesh, shard.parameter):
            boxes = shard.parameter.spec.boxes(mesh.tp.rank, mesh.tp.size)
            for run in split_run(boxes, shard.start, shard.values.numel()):
                yield _Piece(shard.key, run, shard.values[run.offset : run.offset + run.numel])


def _whole_weights(
    mesh: ParallelMesh, parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]
) -> Iterator[StateShard]:
    """What every data-parallel rank holds alike, to be written by them in turn."""
    for index, parameter in enumerate(parameters):
        owned = index % mesh.dp.size == mesh.dp.rank
        yield StateShard(parameter, WEIGHT, 0, tensors[parameter.name].detach().reshape(-1), owned)


def _writes(mesh: ParallelMesh, parameter: Parameter) -> bool:
    """Whether this tensor-parallel rank and stage write the parameter: replicas and tied copies only once."""
    spec = parameter.spec
    return (spec.dim is not None or mesh.tp.rank == 0) and (not spec.stages or mesh.at.pp == spec.stages[0])


def _write(path: Path, pieces: Sequence[_Piece]) -> str:
    """Write one rank's file; returns what the manifest has to say of it, as JSON."""
    if not pieces:
        return json.dumps({"file": path.name, "size_bytes": None, "shards": []})
    by_key = {piece.key: piece for piece in pieces}
    if len(by_key) != len(pieces):
        raise AssertionError("a rank holds the same run of the same tensor twice")
    infos = {key: TensorInfo(piece.values.dtype, piece.shape) for key, piece in by_key.items()}
    hashes, size_bytes = write_tensor_file(path, infos, lambda key: by_key[key].shaped)
    shards = [
        {
            "kind": piece.kind,
            "name": piece.run.part.name,
            "full_shape": piece.run.part.shape,
            "dtype": dtype_name(piece.values.dtype),
            "shard": {
                "key": key,
                "offsets": piece.run.box.offsets,
                "shape": piece.run.box.shape,
                "flat": None if piece.whole else (piece.run.start, piece.run.stop),
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
            entries = tensors.setdefault(row["kind"], {})
            known = entries.get(row["name"], TensorEntry(tuple(row["full_shape"]), row["dtype"], ()))
            if known.dtype != row["dtype"]:
                raise CheckpointError(f"ranks hold {row['name']} as {known.dtype} and as {row['dtype']}")
            shard = shard_from_json({"file": table["file"], **row["shard"]})
            entries[row["name"]] = TensorEntry(known.shape, known.dtype, (*known.shards, shard))
    return {"tensors": tensors, "files": files}


def _complete(partial: Path, published: Path, manifest: Manifest) -> None:
    """Check that nothing is missing, then publish."""
    check_coverage(manifest, partial)
    check_files(manifest, partial)
    write_durably(partial / MANIFEST, to_json(manifest))
    sync_folder(partial)
    publish(partial, published)
