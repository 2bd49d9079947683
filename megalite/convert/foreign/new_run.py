"""The run folder that an import writes: new before, and removed again if the import fails. No torch."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalite.checkpoint.folder import find_latest
from megalite.convert.huggingface.origin import FOLDER
from megalite.errors import CheckpointError


def require_new(run_folder: Path) -> None:
    """Raise CheckpointError if the folder has a checkpoint already."""
    if (before := find_latest(run_folder / "checkpoints")) is not None:
        raise CheckpointError(f"{before} exists already; name another folder to write")


@contextmanager
def new_run(run_folder: Path) -> Iterator[None]:
    """Write a run folder in the `with` block. If the block fails, what it wrote is removed, and new folders above.

    Raises CheckpointError if the folder has a checkpoint already.
    """
    require_new(run_folder)
    folders = [run_folder / name for name in ("checkpoints", "tokenizer", FOLDER)]
    made = [folder for folder in folders if not folder.exists()]
    above = {parent for folder in made for parent in folder.parents if not parent.exists()}
    try:
        yield
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process has put a file there
            for parent in sorted(above, key=lambda folder: len(folder.parts), reverse=True):
                parent.rmdir()
        raise
