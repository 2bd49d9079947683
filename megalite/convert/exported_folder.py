"""Write an export folder atomically: it appears under its name only when it is complete. No torch."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.checkpoint.durable import sync_folder
from megalite.errors import CheckpointError, write_remedy


@contextmanager
def exported_folder(destination: Path, what: str, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `destination` if the block succeeds, else removed.

    what: the kind of folder, for messages. is_ours: whether a folder is an earlier export, which may be replaced.
    Raises CheckpointError if `destination` has other content or cannot be written.
    """
    require_free(destination, what, is_ours)
    partial = destination.with_name(f".{destination.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        yield partial
        _publish(partial, destination)
    except OSError as error:
        another, full = "choose another folder", "free space or choose another folder"
        remedy = write_remedy(error, full=full, forbidden=another) or full
        raise CheckpointError(f"{destination} cannot be written ({error}); {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_free(destination: Path, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Raise CheckpointError if `destination` is a file, or a folder with other content than an earlier export."""
    if destination.is_dir():
        if not any(destination.iterdir()) or is_ours(destination):
            return
        wrong = (
            f"is neither empty nor {what} written by megalite, so it is not replaced; choose another folder"
        )
    elif destination.exists():
        wrong = "is a file; choose another name for the folder"
    else:
        return
    other, value = {"OUTPUT": f"{destination}-export"}, str(destination)
    raise CheckpointError(f"{destination} {wrong}", key="OUTPUT", set=other, value=value)


def _publish(partial: Path, destination: Path) -> None:
    """Rename the export to its final name; an earlier one is first renamed, then removed."""
    sync_folder(partial)
    replaced = partial.with_name(f"{partial.name}-replaced")
    if destination.exists():
        destination.rename(replaced)
    partial.rename(destination)
    sync_folder(destination.parent)
    shutil.rmtree(replaced, ignore_errors=True)
