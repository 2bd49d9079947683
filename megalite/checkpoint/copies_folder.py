"""The folder of a run's copies in a host's shared memory: whose it is, what it has, when it is removed. No torch."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megalite.checkpoint.folder import published_name
from megalite.errors import LaunchError

SHARED_MEMORY = Path("/dev/shm")
_STALE_SECONDS = 24 * 3600.0
_NAME, _RUN, _LOCK = "megalite-copies", "run", "lock"
_IDENTITY = ".in-memory"


def copies_name(checkpoints: Path, *, new: bool) -> str:
    """Return the name of the folder of a run's copies, the same for every start of this run in this folder alone.

    It hangs on a file among the checkpoints: whoever removes these removes the copies with them. new: make another one.
    """
    identity = checkpoints / _IDENTITY
    if new or not identity.exists():
        checkpoints.mkdir(parents=True, exist_ok=True)
        identity.write_text(secrets.token_hex(16))
    return _name_of(checkpoints)


def forget_copies(checkpoints: Path) -> None:
    """Have no later start find the copies of this run: it goes on without."""
    (checkpoints / _IDENTITY).unlink(missing_ok=True)


def _name_of(checkpoints: Path) -> str:
    text = (checkpoints / _IDENTITY).read_text() + str(checkpoints.resolve())
    return f"{_NAME}-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class CopiesFolder:
    """The folder of a run's copies on this host: step-000012/ has the files and notes of one step."""

    def __init__(self, root: Path):
        self.root = root
        self._lock: IO[str] | None = None

    def claim(self, checkpoints: Path) -> None:
        """Make the folder this process's until its end, and remove those of other runs of this user that are over.

        Raises LaunchError where the host's shared memory refuses it, or another process has it.
        """
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            found = self.root.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(0, "another user has it")
            (self.root / _RUN).write_text(str(checkpoints.resolve()))
            self._lock = (self.root / _LOCK).open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "another process uses it" if isinstance(error, BlockingIOError) else error.strerror
            raise LaunchError(
                f"{self.root} cannot be used for copies in memory ({why}); remove it, or set "
                "checkpoint.in_memory_every = 0"
            ) from error
        for other in _own_folders(self.root.parent):
            if other != self.root and _is_over(other):
                _remove_unused(other)

    def release(self) -> None:
        """Leave the folder to another process, as the end of this one does."""
        if self._lock is not None:
            self._lock.close()

    def notes(self) -> list[dict[str, Any]]:
        """Return the notes on files that are whole, of all steps and starts."""
        notes = []
        for path in self.root.glob("step-*/rank-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                note = json.loads(path.read_text())
                name, size, _ = json.loads(note["table"])
                if size is None or (path.parent / name).stat().st_size == size:
                    notes.append(note)
        return notes

    def step(self, step: int) -> Path:
        return self.root / published_name(step)

    def keep(self, *steps: int) -> None:
        """Remove the copies of all other steps."""
        for path in self.root.glob("step-*"):
            if path not in map(self.step, steps):
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        self.release()
        shutil.rmtree(self.root, ignore_errors=True)


def reclaimable_bytes(checkpoints: Path, memory: Path = SHARED_MEMORY) -> int:
    """Return the bytes of the copies of earlier starts of this run, and of runs that are over.

    A start of this run removes them, or writes its own copies in their place.
    """
    known = (checkpoints / _IDENTITY).exists()
    own = memory / _name_of(checkpoints) if known else None
    folders = [each for each in _own_folders(memory) if each == own or _is_over(each)]
    size = 0
    for path in (path for folder in folders for path in folder.glob("step-*/*")):
        with suppress(OSError):  # removed meanwhile
            size += path.lstat().st_size
    return size


def _own_folders(memory: Path) -> Iterator[Path]:
    """Yield the folders of copies that are this user's: anybody may make one of such a name, or a link."""
    for folder in memory.glob(f"{_NAME}-{os.getuid()}-*"):
        with suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield folder


def _is_over(folder: Path) -> bool:
    """Whether the run of a folder has gone on without it, or has not gone on for a day."""
    try:
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            return True
        checkpoints = Path((folder / _RUN).read_text())
    except OSError:
        return False  # it is just being made, or removed
    try:
        return _name_of(checkpoints) != folder.name
    except FileNotFoundError:
        return True  # its run folder is gone
    except OSError:
        return False


def _remove_unused(folder: Path) -> None:
    """Remove a folder unless a process has it."""
    with suppress(OSError), (folder / _LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
