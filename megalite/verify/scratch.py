"""Explains why the temporary folder of a verification takes no files, whichever of its processes finds that."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.errors import (
    CheckpointError,
    DataError,
    MegaliteError,
    RankFailure,
    stdout_refuses,
    write_remedy,
)

_FOLDER, _KEY = "the temporary folder of this verification", "TMPDIR"


class ScratchError(MegaliteError):
    """The temporary folder cannot be written, so that nothing was verified: no verdict on a layout."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(message, key=_KEY)


@contextmanager
def scratch_explained() -> Iterator[None]:
    """Turn an OSError of the temporary folder inside of the `with` block, also an explained one, into ScratchError."""
    try:
        yield
    except (OSError, DataError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or not (problem := _problem(cause)):
            raise
        raise ScratchError(problem) from error


def scratch_error_of(failure: MegaliteError) -> ScratchError | None:
    """Return the ScratchError of another process that `failure` reports; None if it reports something else."""
    if failure.problems[0].key == _KEY:
        return ScratchError(str(failure))
    _, found, text = str(failure).partition(_FOLDER) if isinstance(failure, RankFailure) else ("", "", "")
    return ScratchError(found + text.partition("\n")[0]) if found else None


def full_scratch(folder: Path) -> ScratchError | None:
    """Return the ScratchError of ranks that died without a report, which may have had no room either."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return ScratchError(problem) if (problem := _problem(error)) else None
    return None


def _problem(error: OSError) -> str:
    another = "set TMPDIR to a folder on another disk"
    try:
        folder = tempfile.gettempdir()
    except OSError as none:
        return f"{_FOLDER} cannot be made: {none.strerror}; set TMPDIR to a folder that can be written"
    remedy = write_remedy(error, full=f"free space there, or {another}", forbidden=another)
    if not remedy or (error.filename is None and stdout_refuses()):
        return ""
    return f"{_FOLDER} in {folder} (TMPDIR) cannot be written: {error.strerror}; {remedy}"
