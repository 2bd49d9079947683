"""Token files while they are written: hidden files in the output folder, locked by one process."""

import contextlib
import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalite.data.files.token_file import bin_path, idx_path
from megalite.data.files.workers import WorkerDied
from megalite.errors import DataError

# The errors of file systems without locks (Lustre mounted without flock).
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@dataclass(frozen=True)
class PartialFiles:
    """The open files that become X.bin and X.idx, and the sequence lengths for the index."""

    prefix: Path
    bin_file: IO[bytes]
    idx_file: IO[bytes]
    lengths_file: IO[bytes]

    def cut(self, bin_bytes: int, lengths_bytes: int) -> bool:
        """Truncate what an earlier process wrote to these sizes; False, without a change, if a file is shorter."""
        kept = ((self.bin_file, bin_bytes), (self.lengths_file, lengths_bytes))
        if any(os.fstat(file.fileno()).st_size < size for file, size in kept):
            return False
        for file, size in kept:
            file.truncate(size)
            file.seek(0, os.SEEK_END)
        return True


def partial(path: Path) -> Path:
    # A fixed name, so that the next process resumes or overwrites what a killed one left.
    return path.with_name(f".{path.name}.partial")


def journal_path(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.journal")


@contextlib.contextmanager
def partial_files(prefixes: Sequence[Path]) -> Iterator[list[PartialFiles]]:
    """Open and lock the files for these outputs; their content from an earlier process is kept.

    An Exception removes them. After an interrupt or a killed worker they stay, if there is a journal to resume from.
    Raises DataError while another process has them.
    """
    with contextlib.ExitStack() as stack:
        opened: list[PartialFiles] = []
        try:
            for prefix in prefixes:
                bin_file = stack.enter_context(locked(partial(bin_path(prefix))))
                lengths_file = stack.enter_context(_lengths_path(prefix).open("a+b"))
                idx_file = stack.enter_context(partial(idx_path(prefix)).open("wb"))
                opened.append(PartialFiles(prefix, bin_file, idx_file, lengths_file))
            yield opened
        except BaseException as error:
            lasting = isinstance(error, Exception) and not isinstance(error, WorkerDied)
            # Not in a `finally`: after publishing, another process may already use these names.
            if lasting or not journal_path(prefixes[0]).exists():
                for files in opened:
                    remove(files.prefix)
            raise


def remove(prefix: Path) -> None:
    """Remove the partial files and the journal of `prefix`."""
    for path in (
        partial(bin_path(prefix)),
        partial(idx_path(prefix)),
        _lengths_path(prefix),
        journal_path(prefix),
    ):
        path.unlink(missing_ok=True)


def write_journal(prefix: Path, content: dict[str, Any]) -> None:
    replace_file(journal_path(prefix), json.dumps(content).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dict if there is none, it is damaged, or it is no object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of which this process alone holds the lock, atomically. Raises OSError."""
    _write(partial(path), content)
    partial(path).replace(path)


def publish(files: PartialFiles, facts: dict[str, Any]) -> None:
    """Rename .bin, then .idx, then .json, so that an index never exists beside the tokens of another corpus."""
    prefix = files.prefix
    json_partial = partial(json_path(prefix))
    try:
        _write(json_partial, as_json(facts))
        json_path(prefix).unlink(missing_ok=True)
        idx_path(prefix).unlink(missing_ok=True)
        partial(bin_path(prefix)).replace(bin_path(prefix))
        partial(idx_path(prefix)).replace(idx_path(prefix))
        json_partial.replace(json_path(prefix))
    finally:
        json_partial.unlink(missing_ok=True)
    _lengths_path(prefix).unlink(missing_ok=True)
    folder = os.open(prefix.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically; two processes at once cannot tear it, the later one is kept. Raises OSError."""
    own = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.partial")
    try:
        _write(own, as_json(content))
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def json_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def locked(path: Path) -> IO[bytes]:
    """Open `path` for appending and lock it for this process; DataError if another process holds the lock."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                if isinstance(error, BlockingIOError):
                    raise DataError(
                        f"another process is preparing {path.parent}; wait for it, or choose another output "
                        "(--output, run.folder)"
                    ) from error
                raise
        # Between open and lock the previous owner may have renamed the file: then try again.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


@contextlib.contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """Hold the lock of a partial file, which is removed at the end unless it was renamed; DataError as in `locked`."""
    with locked(path) as file:
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                # Not a file that another process made after ours was renamed.
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    path.unlink()


def _lengths_path(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.lengths.partial")
