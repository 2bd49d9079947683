"""Failures of reading and writing a checkpoint, told with the rank, the reason and a remedy."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import CheckpointError, write_remedy
from megalite.parallel.mesh import ParallelMesh


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


def explain(mesh: ParallelMesh, verb: str, path: Path) -> Callable[[Exception], str]:
    """For `all_or_none`: the message that says which rank could not do what, why, and what to do."""

    def message(error: Exception) -> str:
        return f"{mesh.layout.describe(mesh.rank)} could not {verb} {path}: {reason(error, OF_A_RUN)}"

    return message


def reason(error: Exception, remedies: Remedies) -> str:
    """Return why something could not be read or written, with a remedy where there is one."""
    if isinstance(error, CheckpointError):
        return str(error)
    known = isinstance(error, OSError) and write_remedy(error, **vars(remedies))
    if known:
        return f"{error}; {known}"
    return f"{type(error).__name__}: {error}"
