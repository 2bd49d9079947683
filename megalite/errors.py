"""The errors that a user reads, each with the exit code of the process."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem of the user's input: the setting, the rule that it breaks, the remedy."""

    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def problem_list(problems: Sequence[Problem], source: str) -> str:
    """Return the message that lists all problems of `source`, one on each line."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{source} has {count}", *map(str, problems)])


class MegaliteError(Exception):
    """Base class of all errors raised on purpose; `exit_code` is 2 for the user's input and 1 for the run."""

    exit_code = 1


class ConfigError(MegaliteError):
    """The configuration is invalid; holds all problems, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration"):
        self.problems = tuple(problems)
        self.source = source
        super().__init__(problem_list(self.problems, source))


class LaunchError(MegaliteError):
    """Processes cannot be started or cannot find each other."""

    exit_code = 2


class DataError(MegaliteError):
    """A corpus, tokenizer or token file is missing, damaged or unsuitable."""

    exit_code = 2


class CheckpointError(MegaliteError):
    """A checkpoint or export is missing, damaged, incomplete or does not fit the model."""

    exit_code = 2


class KernelError(MegaliteError):
    """A compiled operator is missing or does not support its input."""


class TrainingError(MegaliteError):
    """The run failed: a rank died, or a loss or gradient is not finite."""


class MemoryExhausted(TrainingError):
    """An accelerator has no memory left for a run, or for a command that runs a model."""


class RankFailure(TrainingError):
    """One or more ranks died; the message holds the first cause and the coordinates of its rank."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names as text, followed by the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
