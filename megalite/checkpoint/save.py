"""Saving a checkpoint: every rank writes its own file; one manifest publishes them all, or none."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.failures import OF_A_RUN, Remedies, explain
from megalite.checkpoint.folder import partial_name, published_name
from megalite.checkpoint.manifest import Base, Manifest, Stream
from megalite.checkpoint.publish import remove_stale
from megalite.checkpoint.unpublished import Draft, StoredPiece, by_key, pieces_of
from megalite.errors import CheckpointError, MemoryExhausted
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.state import OptimizerState
from megalite.version import __version__


@dataclass(frozen=True)
class RunRecord:
    """A run as its checkpoint records it, beside the tensors; the fields are those of `Manifest`.

    trainer_state: at least step, samples and tokens. base: the weights beside an adapter. stream: the position in
    streamed text, on rank 0. data: the fingerprints of the data.
    """

    trainer_state: Mapping[str, Any]
    config: Mapping[str, Any]
    base: Base | None = None
    stream: Stream | None = None
    data: Mapping[str, str] = field(default_factory=dict)


def write_draft(draft: Draft, mesh: ParallelMesh, then: Callable[[], None] = lambda: None) -> None:
    """Write and publish a draft; rank 0 then calls `then`. Collective.

    Raises CheckpointError, on every rank alike, when any rank fails; older checkpoints stay as they were.
    """

    def finish(tables: Sequence[str]) -> None:
        draft.publish(tables)
        then()

    try:
        write = partial(draft.write, draft.tensors.__getitem__)
        table = all_or_none(mesh, write, explain(mesh, "write", draft.path))
        tables = mesh.gather_objects(table)
        last = (lambda: None) if tables is None else partial(finish, tables)
        all_or_none(mesh, last, explain(mesh, "publish", draft.partial))
    except (CheckpointError, MemoryExhausted):
        if mesh.rank == 0:
            remove_stale(draft.partial.parent)
        raise


def draft_checkpoint(folder: Path, replica: Replica, optimizer: OptimizerState, record: RunRecord) -> Draft:
    """List what each rank has to write, and make the partial folder if the disk has room for all ranks.

    Each element is written by exactly one rank: weights by the data-parallel ranks in turn, optimizer state by its
    owner, what several tp ranks hold by the first of them, tied tensors by their first stage. Writes no tensor:
    `write_draft` or a BackgroundWriter does. Collective over the world, which shares `folder`; raises as `write_draft`.
    """
    mesh, (pieces, manifest) = replica.mesh, listed_state(folder, replica, optimizer, record)
    where = folder / mesh.broadcast_object(partial_name(manifest.step, secrets.token_hex(4)))
    draft = Draft(where, folder / published_name(manifest.step), mesh.rank, pieces, manifest)
    sizes = mesh.gather_objects(draft.size_bytes)
    make = partial(prepare_partial, folder, where, sum(sizes or []), OF_A_RUN)
    prepare = explain(mesh, "prepare", folder)
    all_or_none(mesh, lambda: make() if mesh.rank == 0 else None, prepare)
    return draft


def listed_state(
    folder: Path, replica: Replica, optimizer: OptimizerState, record: RunRecord
) -> tuple[dict[str, StoredPiece], Manifest]:
    """Return what this rank has to write, by its key, and the manifest without tensors. Collective, as a draft."""
    mesh, split = replica.mesh, replica.split
    manifest = Manifest(
        megalite=__version__,
        torch=torch.__version__,
        layout=mesh.layout,
        stage_layers=tuple(split.layers_of(stage) for stage in range(split.stages)),
        model=replica.shape,
        optimizer=dict(optimizer.scalars()),
        tensors={},
        files={},
        **vars(record),
    )
    pieces = all_or_none(mesh, lambda: by_key(pieces_of(replica, optimizer)), explain(mesh, "list", folder))
    return pieces, manifest


def prepare_partial(folder: Path, partial: Path, needed_bytes: int, remedies: Remedies) -> None:
    """Make a checkpoint's partial folder below `folder`. Raises CheckpointError unless the disk has room for it."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{os.strerror(errno.ENOSPC)}: the checkpoint has {needed_bytes:,} bytes, and {free_bytes:,} are free; "
            f"{remedies.full}"
        )
    partial.mkdir()
