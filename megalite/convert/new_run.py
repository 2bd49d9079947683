"""The run folder that an import writes: new before, and removed again if the import fails. No torch."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.checkpoint.folder import find_latest
from megalite.convert.huggingface.origin import FOLDER
from megalite.errors import CheckpointError


def imported_folders(run_folder: Path) -> list[Path]:
    """Return the folders of a run that an import writes."""
    return [run_folder / name for name in ("checkpoints", "tokenizer", FOLDER)]


def require_new_run(run_folder: Path) -> None:
    """Raise CheckpointError if a run folder has a checkpoint already."""
    if (before := find_latest(run_folder / "checkpoints")) is not None:
        raise CheckpointError(f"{before} exists already; name another folder to write")


@contextmanager
def undone_on_failure(*folders: Path) -> Iterator[None]:
    """If the block fails, remove those of `folders` that did not exist before, and new empty folders above them."""
    made = [folder for folder in folders if not folder.exists()]
    above = {parent for folder in made for parent in folder.parents if not parent.exists()}
    try:
        yield
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process has put a file there
            for parent in sorted(above, key=lambda each: len(each.parts), reverse=True):
                parent.rmdir()
        raise
