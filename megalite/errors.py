"""The errors that a user reads, each with the exit code of the process."""

import errno
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One problem of the user's input: the setting, the rule that it breaks, the remedy.

    set: what the remedy sets, for a program: setting, --option or positional argument -> value; None: leave it out.
    command: the remedy as words to run before the failed command is repeated. value: what the key is now.
    """

    key: str
    message: str
    remedy: str = ""
    set: Mapping[str, Any] = field(default_factory=dict, compare=False)
    command: Sequence[str] = field(default=(), compare=False)
    value: Any = field(default=None, compare=False)

    @classmethod
    def reset(cls, key: str, message: str, remedy: str, value: Any = None) -> "Problem":
        """Return a problem whose remedy sets the key itself to a value; None: leaves it out."""
        return cls(key, message, remedy, {key: value})

    def as_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {
            "key": self.key or None,
            "value": self.value,
            "rule": self.message,
            "remedy": self.remedy,
            "set": dict(self.set),
            "command": list(self.command),
        }

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def problem_list(problems: Sequence[Problem], source: str) -> str:
    """Return the message that lists all problems of `source`, one on each line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{source} has {count}", *map(str, problems)])


class MegaliteError(Exception):
    """Base class of all errors raised on purpose; `exit_code` is 2 for the user's input and 1 for the run.

    key, set, command, value: as of a Problem, for an error that is one; the text behind "; " is its remedy.
    """

    exit_code = 1

    def __init__(
        self,
        message: str = "",
        *,
        key: str = "",
        set: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
        value: Any = None,
    ):
        rule, _, remedy = str(message).partition("; ")
        self.problems: tuple[Problem, ...] = (Problem(key, rule, remedy, set or {}, command, value),)
        super().__init__(message)


class ConfigError(MegaliteError):
    """The configuration is invalid; holds all problems, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration"):
        super().__init__(problem_list(problems, source))
        self.problems = tuple(problems)
        self.source = source


class LaunchError(MegaliteError):
    """Processes cannot be started or cannot find each other."""

    exit_code = 2


class DataError(MegaliteError):
    """A corpus, tokenizer or token file is missing, damaged or unsuitable."""

    exit_code = 2


class CheckpointError(MegaliteError):
    """A checkpoint or export is missing, damaged, incomplete or does not fit the model."""

    exit_code = 2


class DiskError(MegaliteError):
    """A disk has no space for a file, or the file may not be opened."""

    exit_code = 2


class KernelError(MegaliteError):
    """A compiled operator is missing or does not support its input."""


class TrainingError(MegaliteError):
    """The run failed: a rank died, or a loss or gradient is not finite."""


class MemoryExhausted(TrainingError):
    """An accelerator has no memory left for a run, or for a command that runs a model."""


class RankFailure(TrainingError):
    """One or more ranks died; the message holds the first cause and the coordinates of its rank.

    asked: whether a signal had asked for the end of the job.
    """

    def __init__(self, message: str, exit_code: int = 1, *, asked: bool = False):
        super().__init__(message)
        self.exit_code, self.asked = exit_code, asked


def write_remedy(error: OSError, *, full: str, forbidden: str = "") -> str:
    """Return what to do about a file that could not be written; "" where the cause suggests nothing.

    full, forbidden: the remedy for a full disk and for want of permission, in the settings of the caller's command.
    """
    if error.errno == errno.EFBIG:
        return "raise the limit of file sizes (ulimit -f unlimited)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full
    return forbidden if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give the OSError of a full disk inside of the `with` block, which names no file, the name of this one."""
    try:
        yield
    except OSError as error:
        if write_remedy(error, full="known"):
            error.filename = error.filename or str(path)
        raise


def disk_error(error: OSError) -> DiskError | None:
    """Return what a user reads about a disk that refuses a file; None for an error with another cause."""
    if "temporary directory" in (error.strerror or ""):  # of the module tempfile, which tells no other way
        return DiskError(f"{error.strerror}; free space, or set TMPDIR to a folder that can be written")
    where = error.filename2 or error.filename
    # Without a file it is a port or a process that is forbidden.
    forbidden = "check its permissions, or name another place" if where else ""
    full = "free space there, or name a place on another disk"
    if not (remedy := write_remedy(error, full=full, forbidden=forbidden)):
        return None
    unnamed = (
        "standard output" if not where and stdout_refuses() else "a file of this command, maybe in TMPDIR"
    )
    return DiskError(f"{where or unnamed}: {error.strerror}; {remedy}")


def stdout_refuses() -> bool:
    """Whether standard output takes no more text, as on a full disk; else it has an empty line more."""
    try:
        # Without a buffer nothing is left of the text that was refused.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        return bool(write_remedy(error, full="known"))
    return False


def closest_path(path: Path) -> str:
    """Return the path of the most similar name in the folder of a missing one; "" without one."""
    from difflib import get_close_matches

    try:
        names = [
            each.name
            for each in path.parent.iterdir()
            if not each.name.startswith(".") and each.name != path.name
        ]
    except OSError:
        return ""
    close = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.parent / close[0]) if close else ""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names as text, followed by the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s or es."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"
