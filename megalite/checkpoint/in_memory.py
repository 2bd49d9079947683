"""Copies of a run's state in the memory of its hosts, which survive the death of its ranks.

For each copied step a rank writes its file of a checkpoint, and behind it a note on it, to a folder of /dev/shm; both
go to a rank of the next host too. A copy counts once the hosts together have the notes and files of all ranks of one
start: a torn one lacks some. The hashes in the notes show altered bytes when a copy is read.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from megalite.checkpoint.folder import published_name
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.manifest_json import from_json, to_json
from megalite.checkpoint.unpublished import Draft, merged_tables
from megalite.errors import CheckpointError, LaunchError
from megalite.parallel.host_ring import HostRing

SHARED_MEMORY = Path("/dev/shm")
_STALE_SECONDS = 24 * 3600.0
_NAME, _RUN, _LOCK = "megalite-copies", "run", "lock"
_IDENTITY = ".in-memory"
_FIRST_NOTE = "rank-00000.json"


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
            self._lock = (self.root / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "another process uses it" if isinstance(error, BlockingIOError) else error.strerror
            raise LaunchError(
                f"{self.root} cannot be used for copies in memory ({why}); remove it, or set "
                "checkpoint.in_memory_every = 0"
            ) from error
        for other in self.root.parent.glob(f"{_NAME}-{os.getuid()}-*"):
            if other != self.root and _is_over(other):
                shutil.rmtree(other, ignore_errors=True)

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


def _is_over(folder: Path) -> bool:
    """Whether no process has the folder, and its run has gone on without it or has not gone on for a day."""
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old = time.time() - folder.stat().st_mtime > _STALE_SECONDS
            if old or not (folder / _RUN).exists():  # one that is just being made has none yet
                return old
            return _name_of(Path((folder / _RUN).read_text())) != folder.name
    except FileNotFoundError:
        return True  # its run folder is gone
    except OSError:
        return False


class MemoryDraft(Draft):
    """A copy in the making: `write` writes this rank's file and note, and has the next host keep them."""

    def __init__(self, start: str, ring: HostRing | None, *draft: Any):
        """start: a text that no other start of the run has. draft: what a Draft is made of."""
        super().__init__(*draft)
        self._start, self._ring = start, ring

    def write(self, read: Callable[[str], Tensor]) -> str:
        """As of a draft, to shared memory. Raises CheckpointError."""
        tables, failures = list[str](), list[Exception]()

        # The next host waits for this rank's words, whatever happens.
        def attempt(action: Callable[[], object]) -> None:
            try:
                action()
            except Exception as error:
                failures.append(error)

        self.partial.mkdir(exist_ok=True)
        attempt(lambda: tables.append(super(MemoryDraft, self).write(read)))
        attempt(lambda: self._pass_on(self.path, failures))
        note = self.path.with_suffix(".json")
        if not failures:
            attempt(lambda: self._write_note(note, tables[0]))
        attempt(lambda: self._pass_on(note, failures))
        if failures:
            full = isinstance(failures[0], OSError) and failures[0].errno == errno.ENOSPC
            remedy = "; enlarge it (docker --shm-size, mount -o remount,size=)" if full else ""
            raise CheckpointError(f"{self.path}: {failures[0]}{remedy}") from failures[0]
        return ""

    def publish(self, tables: Sequence[str]) -> None:
        """Do nothing: the notes say that the copy is whole."""

    def _pass_on(self, file: Path, failures: Sequence[Exception]) -> None:
        if self._ring is not None:
            others = [self.partial / f"rank-{source:05d}{file.suffix}" for source in self._ring.sources]
            self._ring.pass_on(file if file.exists() and not failures else None, others)

    def _write_note(self, path: Path, table: str) -> None:
        of_rank_0 = path.name == _FIRST_NOTE
        note = {
            "step": self.step,
            "start": self._start,
            "ranks": self._manifest.layout.world_size,
            "table": table,
            # That of rank 0 alone has the position in streamed text.
            "manifest": to_json(self._manifest) if of_rank_0 else None,
        }
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(json.dumps(note))
        unfinished.rename(path)


@dataclass(frozen=True)
class WholeCopy:
    """A copy that the hosts have together. holders: file -> a rank of each host that has it."""

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]


def whole_copies(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[WholeCopy]:
    """Yield the whole copies, newest first. found: a rank of each host -> `CopiesFolder.notes` there.

    Raises CheckpointError for a damaged note.
    """
    starts: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    holders: dict[tuple[int, str], dict[str, list[int]]] = {}
    for holder, notes in found.items():
        for note in notes:
            of, name = (note["step"], note["start"]), json.loads(note["table"])[0]
            starts.setdefault(of, {})[int(name[len("rank-") :].split(".")[0])] = note
            holders.setdefault(of, {}).setdefault(name, []).append(holder)
    for of in sorted(starts, reverse=True):
        notes_of = starts[of]
        first = notes_of.get(0)
        if first is not None and sorted(notes_of) == list(range(first["ranks"])):
            tables = [notes_of[rank]["table"] for rank in sorted(notes_of)]
            written = from_json(first["manifest"].splitlines(keepends=True), Path(_FIRST_NOTE))
            yield WholeCopy(replace(written, **merged_tables(tables)), holders[of])
