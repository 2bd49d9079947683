"""The paths of a run folder, and its lock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megalite.errors import ConfigError, Problem


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
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

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

    def _claim(self) -> IO[bytes]:
        """Return the open, locked file that marks the folder as in use."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            claim = (self.root / ".in-use").open("wb")
        except OSError as error:
            problem = Problem(
                "run.folder",
                f"{self.root} cannot be written ({error.strerror})",
                "name another folder, for example runs/second",
            )
            raise ConfigError([problem]) from error
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = Problem(
                "run.folder",
                f"another job uses {self.root}",
                "wait for its end, stop it, or name another folder",
            )
            raise ConfigError([problem]) from error
        except OSError:
            pass  # a file system without locks cannot keep another run out
        return claim
