"""The temporary folder of a process that starts ranks, also where a kill leaves it behind."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from tempfile import gettempdir, mkdtemp

# Other than that of earlier versions, which held no lock. Those of NFS may count on one host alone.
_PREFIX = f"megalite-starter-{gethostname()}@"


@contextmanager
def starter_folder() -> Iterator[Path]:
    """Yield a new folder, locked as long as this process or one that it forked lives.

    Folders of this user without a lock are removed: their jobs were killed.
    """
    for abandoned in Path(gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_unused(abandoned)
    folder, lock = _locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked() -> tuple[Path, int]:
    while True:
        folder = Path(mkdtemp(prefix=_PREFIX))
        # Before the lock another start may remove it.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, where nobody removes it either
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a folder. Raises OSError if it is in use, another user's, or a link."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid():
            shutil.rmtree(folder)
    finally:
        os.close(lock)
