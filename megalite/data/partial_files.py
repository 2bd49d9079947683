"""Token files while they are written: hidden beside where they will stand, and claimed by one process."""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalite.data.token_file import bin_path, idx_path
from megalite.data.workers import WorkerDied
from megalite.errors import DataError

# File systems without locks (Lustre mounted without flock) answer so.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@dataclass(frozen=True)
class PartialFiles:
    """What becomes X.bin and X.idx, and the lengths that the index is made of."""

    prefix: Path
    bin_file: IO[bytes]
    idx_file: IO[bytes]
    lengths_file: IO[bytes]

    def cut(self, bin_bytes: int, lengths_bytes: int) -> bool:
        """Keep so many bytes of what an earlier process wrote; False, and nothing is done, where there are less."""
        kept = ((self.bin_file, bin_bytes), (self.lengths_file, lengths_bytes))
        if any(os.fstat(file.fileno()).st_size < size for file, size in kept):
            return False
        for file, size in kept:
            file.truncate(size)
            file.seek(0, os.SEEK_END)
        return True


def partial(path: Path) -> Path:
    # Always the same name: what a killed process leaves behind, the next one takes up or overwrites.
    return path.with_name(f".{path.name}.partial")


def journal_path(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.journal")


@contextlib.contextmanager
def partial_files(prefixes: Sequence[Path]) -> Iterator[list[PartialFiles]]:
    """Files to write and publish, this process's alone.

    They keep what an earlier process left in them. An Exception removes them; an interrupt or a killed worker leaves
    them to be taken up, if there is a journal.
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
            # Only here: once published, these names may already be another process's.
            if lasting or not journal_path(prefixes[0]).exists():
                for files in opened:
                    remove(files.prefix)
            raise


def remove(prefix: Path) -> None:
    """Remove what is left of writing `prefix`."""
    for path in (
        partial(bin_path(prefix)),
        partial(idx_path(prefix)),
        _lengths_path(prefix),
        journal_path(prefix),
    ):
        path.unlink(missing_ok=True)


def read_journal(prefix: Path) -> dict[str, Any]:
    """What was last written there; empty where there is nothing of use."""
    try:
        content = json.loads(journal_path(prefix).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_journal(prefix: Path, content: dict[str, Any]) -> None:
    path = journal_path(prefix)
    with partial(path).open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial(path).replace(path)


def publish(files: PartialFiles, facts: dict[str, Any]) -> None:
    """Rename .bin, then .idx, then write .json: at no moment does an index stand beside another corpus's tokens."""
    prefix = files.prefix
    json_partial = partial(json_path(prefix))
    try:
        with json_partial.open("w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
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


def json_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def locked(path: Path) -> IO[bytes]:
    """Open `path` to append to; DataError when another process has it open so. The lock dies with its process."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                if isinstance(error, BlockingIOError):
                    raise DataError(
                        f"another process is preparing {path.parent}; wait for it or choose another output"
                    ) from error
                raise
        # Between opening and locking, its last owner may have published it under another name: then begin anew.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def _lengths_path(prefix: Path) -> Path:
    return prefix.with_name(f".{prefix.name}.lengths.partial")
