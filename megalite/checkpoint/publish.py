"""Publish checkpoints atomically, and remove old and unfinished ones. No torch."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.durable import sync_folder, write_durably
from megalite.checkpoint.folder import (
    BEST,
    LATEST,
    PARTIAL,
    check_files,
    named_by,
    published_checkpoints,
    require_whole,
)
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.manifest_json import texts_of
from megalite.errors import CheckpointError

logger = logging.getLogger(__name__)


def remove_stale(folder: Path) -> None:
    """Remove the partial folders of killed saves, except the one that `latest` names."""
    named = named_by(folder / LATEST)
    for path in folder.glob(".step-*.partial-*"):
        if PARTIAL.fullmatch(path.name) and path != named:
            shutil.rmtree(path, ignore_errors=True)


def publish(manifest: Manifest, partial: Path, published: Path) -> None:
    """Check that a checkpoint's files are whole, write its manifest, give it its final name, then write `latest`.

    Raises CheckpointError if an element or a file is missing. At every moment `latest` names a complete checkpoint: an
    older one, the replaced one, or the new one. If `published` exists (a run was killed between the two steps, or
    resumed from an earlier step), it is kept if it has the same content, else replaced.
    """
    check_coverage(manifest, partial)
    check_files(manifest, partial)
    write_durably(partial / MANIFEST, texts_of(manifest))
    sync_folder(partial)
    folder = published.parent
    if published.exists() and _same_numbers(partial, published):
        shutil.rmtree(partial)
    elif published.exists():
        if named_by(folder / LATEST) == published:
            # `latest` names the partial folder until the new checkpoint has its final name.
            write_latest(folder, partial.name)
        replaced = partial.with_name(f"{partial.name}_replaced")
        published.rename(replaced)
        partial.rename(published)
    else:
        partial.rename(published)
    sync_folder(folder)
    write_latest(folder, published.name)
    remove_stale(folder)


def write_latest(folder: Path, name: str) -> None:
    """Write `latest` atomically."""
    _write_pointer(folder / LATEST, name)


def write_best(folder: Path, name: str) -> None:
    """Write `best` atomically; does nothing if there is no checkpoint of that name."""
    if (folder / name).is_dir() and named_by(folder / BEST) != folder / name:
        _write_pointer(folder / BEST, name)


def _write_pointer(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".{pointer.name}.new")
    write_durably(temporary, f"{name}\n")
    temporary.replace(pointer)
    sync_folder(pointer.parent)


def remove_older(
    folder: Path, step: int, *, keep: int, every: int | None = None, protected: Sequence[Path] = ()
) -> None:
    """Remove complete checkpoints up to `step`, except the last `keep` and those of multiples of `every` steps.

    `protected` checkpoints, `latest` and `best` are never removed. Each is renamed before it is deleted, so a crash
    leaves a partial folder for `remove_stale`, not a half-deleted checkpoint. A failure is only logged.
    """
    kept = {path.resolve() for path in protected}
    kept |= {
        named.resolve() for pointer in (LATEST, BEST) if (named := named_by(folder / pointer)) is not None
    }
    until_step = sorted(
        (number, path) for number, path in published_checkpoints(folder).items() if number <= step
    )
    kept |= {path.resolve() for number, path in until_step if every is not None and number % every == 0}
    whole = [path for _, path in until_step if _is_whole(path)]
    for path in whole[: max(0, len(whole) - keep)]:
        if path.resolve() not in kept:
            removed = folder / f".{path.name}.partial-removed"
            shutil.rmtree(removed, ignore_errors=True)
            try:
                path.rename(removed)
            except OSError as error:
                logger.warning("%s could not be removed (%s): remove it by hand", path, error.strerror)
            shutil.rmtree(removed, ignore_errors=True)


def _is_whole(checkpoint: Path) -> bool:
    try:
        require_whole(checkpoint)
    except CheckpointError:
        return False
    return True


def _same_numbers(new: Path, old: Path) -> bool:
    try:
        first, second = require_whole(new), require_whole(old)
    except CheckpointError:
        return False
    names = ("trainer_state", "model", "optimizer", "tensors", "files")
    return all(getattr(first, name) == getattr(second, name) for name in names)
