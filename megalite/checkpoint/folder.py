"""Folders of checkpoints: names, the `latest` and `best` files, what a killed save leaves behind. No torch.

A save is written to `.step-000100.partial-<token>` and renamed to `step-000100` when it is whole; then
`latest` is made to name it.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.checkpoint.format import MANIFEST, Manifest, check_sizes, from_json
from megalite.errors import CheckpointError

LATEST = "latest"
BEST = "best"
_STEP = re.compile(r"step-(\d{6,})")
_PARTIAL = re.compile(r"\.(step-\d{6,})\.partial-\w+")

logger = logging.getLogger(__name__)


def published_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_name(step: int, token: str) -> str:
    return f".{published_name(step)}.partial-{token}"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of one checkpoint folder; raises CheckpointError when it is missing or damaged."""
    path = own_file(checkpoint, MANIFEST)
    try:
        return from_json(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: {checkpoint} is not a checkpoint") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def require_whole(checkpoint: Path) -> Manifest:
    """The manifest, once every file it names is found with its size; raises CheckpointError otherwise."""
    manifest = read_manifest(checkpoint)
    check_files(manifest, checkpoint)
    return manifest


def own_file(checkpoint: Path, name: str) -> Path:
    """The path of a checkpoint's file; raises CheckpointError where it leads out of the folder, or is no file."""
    path = checkpoint / name
    if path.is_symlink() and path.resolve().parent != checkpoint.resolve():
        raise CheckpointError(f"{path} is a link out of its folder; put the file itself there")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file; use another checkpoint")
    return path


def check_files(manifest: Manifest, checkpoint: Path) -> None:
    """Raise CheckpointError unless every file is there with its size, and large enough for its tensors."""
    check_sizes(manifest, checkpoint)
    for name, size_bytes in manifest.files.items():
        path = own_file(checkpoint, name)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; every rank must write to (and keep) one shared folder")
        found_bytes = path.stat().st_size
        if found_bytes != size_bytes:
            raise CheckpointError(f"{path} has {found_bytes} bytes instead of {size_bytes}: it was cut short")


def find_latest(folder: Path) -> Path | None:
    """The checkpoint to resume from in a `checkpoints` folder; None where there is none.

    It is the one that `latest` names; when that file is missing or names a broken checkpoint, a warning is
    logged and the whole checkpoint with the highest step is taken. Sizes are checked here, hashes on loading.
    Raises CheckpointError when there are checkpoints but none is whole.
    """
    named, problem = _named_by(folder / LATEST), f"{folder / LATEST} is missing or names no checkpoint"
    if named is not None:
        try:
            require_whole(named)
            return named
        except CheckpointError as error:
            problem = f"{folder / LATEST} names a broken checkpoint: {error}"
    candidates = _published(folder)
    for _, path in sorted(candidates.items(), reverse=True):
        try:
            require_whole(path)
        except CheckpointError as error:
            logger.warning("skipping a broken checkpoint: %s", error)
            continue
        logger.warning("%s; using %s, the newest whole one", problem, path)
        return path
    if candidates or (folder / LATEST).exists():
        raise CheckpointError(f"{folder} holds no whole checkpoint: {problem}; remove it to start anew")
    return None


def require_new_run(run_folder: Path) -> None:
    """Raise CheckpointError where a run's folder has a checkpoint already."""
    if (before := find_latest(run_folder / "checkpoints")) is not None:
        raise CheckpointError(f"{before} is there already; name another folder to write")


@contextmanager
def undone_on_failure(*folders: Path) -> Iterator[None]:
    """Where the block fails, remove those of `folders` that it made, and what it made above them."""
    made = [folder for folder in folders if not folder.exists()]
    above = {parent for folder in made for parent in folder.parents if not parent.exists()}
    try:
        yield
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # somebody else has put something there meanwhile
            for parent in sorted(above, key=lambda each: len(each.parts), reverse=True):
                parent.rmdir()
        raise


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: one itself, a folder of them, a run's folder, or its checkpoints/best.

    Raises CheckpointError when there is none.
    """
    if path.name == BEST and not path.is_dir():
        best = find_best(path.parent)
        if best is None:
            raise CheckpointError(f"{path} names no checkpoint; checkpoint.best = true keeps one")
        return best
    if (path / MANIFEST).is_file():
        return path
    for folder in (path / "checkpoints", path):
        found = find_latest(folder)
        if found is not None:
            return found
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name a checkpoint's folder or a run's")
    hint = ""
    if (path / "config.json").is_file():
        hint = "; a Hugging Face folder is made one by: megalite convert import FOLDER RUN"
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a run's folder with one; no {MANIFEST} is there{hint}"
    )


def find_best(folder: Path) -> Path | None:
    """What `best` names in a `checkpoints` folder, None where there is none. Raises CheckpointError if broken."""
    named = _named_by(folder / BEST)
    if named is None:
        return None
    require_whole(named)
    return named


def older_checkpoints(checkpoint: Path) -> list[Path]:
    """What stands beside a checkpoint as one of an earlier step, the newest first; they need not be whole."""
    steps = _published(checkpoint.parent)
    own = next((step for step, path in steps.items() if path.name == checkpoint.name), None)
    return [path for step, path in sorted(steps.items(), reverse=True) if own is None or step < own]


def last_checkpoints(path: Path, count: int) -> list[Path]:
    """What `path` means and the checkpoints of `count` - 1 steps before it, all whole; the newest first.

    Raises CheckpointError where there are fewer, or one is broken.
    """
    newest = find_checkpoint(path)
    found = [newest, *older_checkpoints(newest)][:count]
    if len(found) < count:
        raise CheckpointError(
            f"{newest.parent} has {len(found)} checkpoints up to {newest.name}, not {count}; average fewer, or keep"
            f" more with checkpoint.keep_last = {count}"
        )
    for each in found:
        require_whole(each)
    return found


def checkpoints_of(path: Path, steps: Sequence[int]) -> list[Path]:
    """The checkpoints of those steps, all whole, beside the one that `path` means; raises CheckpointError."""
    folder = find_checkpoint(path).parent
    there = _published(folder)
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
    """The tokenizer of the run that wrote a checkpoint: where its configuration says, or in the run's folder."""
    run = checkpoint.resolve().parent.parent
    named = (manifest.config.get("tokenizer") or {}).get("path")
    if named and Path(named).exists():
        return Path(named)
    folders = (run / "tokenizer", run / "export")
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)


def remove_stale(folder: Path) -> None:
    """Remove what killed saves left behind; never what `latest` names."""
    named = _named_by(folder / LATEST)
    for path in folder.glob(".step-*.partial-*"):
        if _PARTIAL.fullmatch(path.name) and path != named:
            shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, published: Path) -> None:
    """Give a whole checkpoint its name and make `latest` name it, last.

    At every moment `latest` leads to a whole checkpoint: an older one, the one replaced, or the new one. When
    `published` exists (a run was killed between the two steps, or resumed from an earlier step) and holds the
    same numbers it is kept; otherwise the new one takes its place.
    """
    folder = published.parent
    if published.exists() and _same_numbers(partial, published):
        shutil.rmtree(partial)
    elif published.exists():
        if _named_by(folder / LATEST) == published:
            # Until it has its final name the new one is found under the present one.
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
    """Make `latest` name a checkpoint, atomically."""
    _write_pointer(folder / LATEST, name)


def write_best(folder: Path, name: str) -> None:
    """Make `best` name a checkpoint, atomically; without effect where there is none of that name."""
    if (folder / name).is_dir() and _named_by(folder / BEST) != folder / name:
        _write_pointer(folder / BEST, name)


def _write_pointer(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".{pointer.name}.new")
    write_durably(temporary, f"{name}\n")
    temporary.replace(pointer)
    sync_folder(pointer.parent)


def remove_older(
    folder: Path, step: int, *, keep: int, every: int | None = None, spared: Sequence[Path] = ()
) -> None:
    """Of the whole checkpoints up to `step` remove all but the last `keep` and those of multiples of `every` steps.

    Never what is spared, `latest` or `best`. Each loses its name at once, so that a crash leaves none that is whole by
    name alone; `remove_stale` removes it. One that cannot be removed is a warning: the run has its newest.
    """
    kept = {path.resolve() for path in spared}
    kept |= {
        named.resolve() for pointer in (LATEST, BEST) if (named := _named_by(folder / pointer)) is not None
    }
    found = sorted((number, path) for number, path in _published(folder).items() if number <= step)
    kept |= {path.resolve() for number, path in found if every is not None and number % every == 0}
    whole = [path for _, path in found if _is_whole(path)]
    for path in whole[: max(0, len(whole) - keep)]:
        if path.resolve() not in kept:
            removed = folder / f".{path.name}.partial-removed"
            shutil.rmtree(removed, ignore_errors=True)
            try:
                path.rename(removed)
            except OSError as error:
                logger.warning("%s is not needed and cannot be removed (%s): remove it", path, error.strerror)
            shutil.rmtree(removed, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's names are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _published(folder: Path) -> dict[int, Path]:
    """Step -> what is named as its checkpoint."""
    return {int(match[1]): path for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))}


def _is_whole(checkpoint: Path) -> bool:
    try:
        require_whole(checkpoint)
    except CheckpointError:
        return False
    return True


def _named_by(pointer: Path) -> Path | None:
    """None where `latest` or `best` is missing, cannot be read or holds something else than a checkpoint's name."""
    folder = pointer.parent
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    partial = _PARTIAL.fullmatch(name)
    if partial and not (folder / name).exists():
        # Killed in `publish` between the final rename and the last write of `latest`.
        return folder / partial[1]
    return folder / name if partial or _STEP.fullmatch(name) else None


def _same_numbers(one: Path, other: Path) -> bool:
    try:
        first, second = require_whole(one), require_whole(other)
    except CheckpointError:
        return False
    names = ("trainer_state", "model", "optimizer", "tensors", "files")
    return all(getattr(first, name) == getattr(second, name) for name in names)
