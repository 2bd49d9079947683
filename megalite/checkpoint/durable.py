"""Writes that survive a crash of the machine: files and folder entries are synced to the disk."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_durably(path: Path, pieces: Iterable[str]) -> None:
    """Write a text file, given as one text or in pieces, and sync it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines([pieces] if isinstance(pieces, str) else pieces)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
