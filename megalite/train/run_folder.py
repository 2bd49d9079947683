"""The paths of a run folder, and its lock."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megalite.errors import ConfigError, Problem, TrainingError, write_remedy

_LOCK = ".in-use"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def failures(self) -> Path:
        return self.root / "failures"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def starts(self) -> Path:
        return self.root / "starts.jsonl"

    @property
    def reference(self) -> Path:
        return self.root / "reference.json"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other jobs out of the folder inside of the `with` block.

        Raises ConfigError when another job is at work in it, or when it cannot be written.
        """
        claim = self._claim()
        try:
            yield
        finally:
            with suppress(OSError):
                # A process that was forked meanwhile may have a copy of the file, which would keep the lock.
                fcntl.flock(claim, fcntl.LOCK_UN)
            claim.close()

    def mark(self, text: str) -> None:
        """Leave a text in the lock, for the ranks on other hosts to see that they share the folder."""
        (self.root / _LOCK).write_text(text)

    def shows(self, text: str, seconds: float) -> bool:
        """Whether the lock holds the text of `mark`, or comes to: a network file system shows new files late."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                if (self.root / _LOCK).read_text() == text:
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)

    @contextmanager
    def full_disk_explained(self) -> Iterator[None]:
        """Turn the OSError of a full disk inside of the `with` block, as of metrics.jsonl, into a TrainingError."""
        try:
            yield
        except OSError as error:
            if not (
                remedy := write_remedy(error, full="free space there, or set run.folder to another disk")
            ):
                raise
            where = error.filename or self.root
            raise TrainingError(
                f"{where} cannot be written: {error.strerror}; {remedy}, then run again to resume"
            ) from error

    def _claim(self) -> IO[bytes]:
        """Return the open, locked file that marks the folder as in use."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            claim = (self.root / _LOCK).open("ab")
        except OSError as error:
            problem = Problem.reset(
                "run.folder",
                f"{self.root} cannot be written ({error.strerror})",
                "name another folder, for example runs/second",
                "runs/second",
            )
            raise ConfigError([problem]) from error
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = Problem.reset(
                "run.folder",
                f"another job uses {self.root}",
                "wait for its end, stop it, or name another folder",
                f"{self.root}-2",
            )
            raise ConfigError([problem]) from error
        except OSError:
            pass  # a file system without locks cannot keep another run out
        return claim
