"""Find checkpoints: folder names, the `latest` and `best` files, checks that a checkpoint is whole. No torch.

A save is written to `.step-000100.partial-<token>` and renamed to `step-000100` when it is whole; then
`latest` is made to name it.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from megalite.checkpoint.coverage import check_sizes
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.manifest_json import from_json
from megalite.errors import CheckpointError, closest_path

LATEST = "latest"
BEST = "best"
_STEP = re.compile(r"step-(\d{6,})")
PARTIAL = re.compile(r"\.(step-\d{6,})\.partial-\w+")

logger = logging.getLogger(__name__)


def published_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_name(step: int, token: str) -> str:
    return f".{published_name(step)}.partial-{token}"


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest. Raises CheckpointError if it is missing or damaged."""
    path = own_file(checkpoint, MANIFEST)
    try:
        with path.open(encoding="utf-8") as lines:
            return from_json(lines, path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist: {checkpoint} is not a checkpoint; name another folder"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error


def require_whole(checkpoint: Path) -> Manifest:
    """Return the manifest. Raises CheckpointError unless all its files exist with the recorded sizes."""
    manifest = read_manifest(checkpoint)
    check_files(manifest, checkpoint)
    return manifest


def own_file(checkpoint: Path, name: str) -> Path:
    """Return the path of a checkpoint's file. Raises CheckpointError for a link out of the folder or a non-file."""
    path = checkpoint / name
    if path.is_symlink() and path.resolve().parent != checkpoint.resolve():
        raise CheckpointError(f"{path} is a link out of its folder; put the file itself there")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; use another checkpoint")
    return path


def check_files(manifest: Manifest, checkpoint: Path) -> None:
    """Raise CheckpointError unless each file exists with its recorded size and is large enough for its tensors."""
    check_sizes(manifest, checkpoint)
    for name, size_bytes in manifest.files.items():
        path = own_file(checkpoint, name)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; every rank must write to (and keep) one shared folder")
        found_bytes = path.stat().st_size
        if found_bytes != size_bytes:
            raise CheckpointError(f"{path} has {found_bytes} bytes instead of {size_bytes}: it was cut short")


def find_latest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from in a `checkpoints` folder; None if the folder has none.

    This is the checkpoint that `latest` names. If that file is missing or names a broken checkpoint, a warning is
    logged once and the complete checkpoint with the highest step is returned. File sizes are checked here, hashes on
    loading. Raises CheckpointError if there are checkpoints but none is complete.
    """
    named, problem = named_by(folder / LATEST), f"{folder / LATEST} is missing or names no checkpoint"
    if named is not None:
        try:
            require_whole(named)
            return named
        except CheckpointError as error:
            broken = error if named.exists() else f"{named.name} does not exist"
            problem = f"{folder / LATEST} names a broken checkpoint: {broken}"
    candidates = published_checkpoints(folder)
    for _, path in sorted(candidates.items(), reverse=True):
        try:
            require_whole(path)
        except CheckpointError as error:
            _warn_once(f"skipping a broken checkpoint: {error}")
            continue
        _warn_once(f"{problem}; using {path}, the newest complete one")
        return path
    if candidates or (folder / LATEST).exists():
        raise CheckpointError(f"{folder} has no complete checkpoint: {problem}; remove it to start anew")
    return None


@cache
def _warn_once(text: str) -> None:
    """Log a warning; not again in this process, or those that it forks, each of which may look for the checkpoint."""
    logger.warning(text)


def progress_of_saves(folder: Path) -> frozenset[tuple[str, int]]:
    """Return (file, bytes) of all unfinished saves in a `checkpoints` folder: it changes while any rank writes."""
    sizes = set[tuple[str, int]]()
    for path in folder.glob(".step-*.partial-*/*"):
        # Published or removed meanwhile.
        with suppress(OSError):
            sizes.add((str(path), path.stat().st_size))
    return frozenset(sizes)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` names: a checkpoint, a folder of them, a run folder, or checkpoints/best.

    For a folder of checkpoints this is the latest. Raises CheckpointError if there is none.
    """
    if path.name == BEST and not path.is_dir():
        best = find_best(path.parent)
        if best is None:
            raise CheckpointError(f"{path} names no checkpoint; set checkpoint.best = true to keep one")
        return best
    if (path / MANIFEST).is_file():
        return path
    for folder in (path / "checkpoints", path):
        latest = find_latest(folder)
        if latest is not None:
            return latest
    if not path.exists():
        close = closest_path(path)
        remedy = f"did you mean {close}?" if close else "name a checkpoint folder or a run folder"
        cure = {"MODEL": close} if close else {}
        raise CheckpointError(f"{path} does not exist; {remedy}", key="MODEL", set=cure, value=str(path))
    hint = ""
    if (path / "config.json").is_file():
        hint = "; to import a Hugging Face folder: megalite convert import FOLDER RUN"
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a run folder with one: it has no {MANIFEST}{hint}"
    )


def find_best(folder: Path) -> Path | None:
    """Return the checkpoint that `best` names in a `checkpoints` folder; None without one.

    Raises CheckpointError if that checkpoint is broken.
    """
    named = named_by(folder / BEST)
    if named is None:
        return None
    require_whole(named)
    return named


def older_checkpoints(checkpoint: Path) -> list[Path]:
    """Return the checkpoints of earlier steps in the same folder, newest first; they may be incomplete."""
    steps = published_checkpoints(checkpoint.parent)
    own = next((step for step, path in steps.items() if path.name == checkpoint.name), None)
    return [path for step, path in sorted(steps.items(), reverse=True) if own is None or step < own]


def last_checkpoints(path: Path, count: int) -> list[Path]:
    """Return the checkpoint that `path` names and the `count` - 1 before it, newest first.

    Raises CheckpointError if there are fewer or one is broken.
    """
    newest = find_checkpoint(path)
    newest_first = [newest, *older_checkpoints(newest)][:count]
    if len(newest_first) < count:
        raise CheckpointError(
            f"{newest.parent} has {len(newest_first)} checkpoints up to {newest.name}, not {count}; average at most"
            f" {len(newest_first)}, or keep more with checkpoint.keep_last = {count}"
        )
    for checkpoint in newest_first:
        require_whole(checkpoint)
    return newest_first


def checkpoints_of(path: Path, steps: Sequence[int]) -> list[Path]:
    """Return the checkpoints of these steps, from the folder of the checkpoint that `path` names.

    Raises CheckpointError if one is missing or broken.
    """
    folder = find_checkpoint(path).parent
    there = published_checkpoints(folder)
    missing = [step for step in steps if step not in there]
    if missing:
        raise CheckpointError(
            f"{folder} has no checkpoint of step {', '.join(map(str, missing))}; it has those of"
            f" {', '.join(map(str, sorted(there)))}"
        )
    for step in steps:
        require_whole(there[step])
    return [there[step] for step in steps]


def find_tokenizer(checkpoint: Path, manifest: Manifest) -> Path | None:
    """Return the tokenizer of a checkpoint's run: the one its configuration names, else one in the run folder; None."""
    settings = manifest.config.get("tokenizer") or {}
    # With added tokens the run has a copy of its own.
    named = None if settings.get("add_tokens") else settings.get("path")
    if named and Path(named).exists():
        return Path(named)
    folders = [run / name for run in run_folders(checkpoint) for name in ("tokenizer", "export")]
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)


def run_folders(checkpoint: Path) -> tuple[Path, Path]:
    """Return where a checkpoint's run may be: by its path as written, and by that without links.

    RUN/checkpoints may be a link to another disk, and a checkpoint's own name a link into its run.
    """
    return checkpoint.absolute().parent.parent, checkpoint.resolve().parent.parent


def published_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> checkpoint folder, for all folders with a checkpoint's name."""
    return {int(match[1]): path for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))}


def named_by(pointer: Path) -> Path | None:
    """Return the checkpoint that the file `latest` or `best` names; None if missing, unreadable or no such name."""
    folder = pointer.parent
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    partial = PARTIAL.fullmatch(name)
    if partial and not (folder / name).exists():
        # The process was killed in `publish`, between the final rename and the last write of `latest`.
        return folder / partial[1]
    return folder / name if partial or _STEP.fullmatch(name) else None
