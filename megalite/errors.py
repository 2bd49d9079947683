"""Every error that a user can cause or has to read, with the process exit code it leads to."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the user's input: which setting, what rule it breaks, what to do."""

    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


class MegaliteError(Exception):
    """Base of all errors raised on purpose; `exit_code` is 2 for the user's input and 1 for the run."""

    exit_code = 1


class ConfigError(MegaliteError):
    """The run cannot start as described; holds every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration"):
        self.problems = tuple(problems)
        self.source = source
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source} has {count}", *map(str, self.problems)]))


class LaunchError(MegaliteError):
    """Processes cannot be started or cannot find each other."""

    exit_code = 2


class DataError(MegaliteError):
    """A corpus, tokenizer or token file is missing, damaged or unfit."""

    exit_code = 2


class CheckpointError(MegaliteError):
    """A checkpoint or export is missing, damaged, incomplete or does not fit the model."""

    exit_code = 2


class KernelError(MegaliteError):
    """A compiled operator is missing or refuses its input."""


class TrainingError(MegaliteError):
    """The run itself went wrong: a rank failed, or the numbers are no longer finite."""


class RankFailure(TrainingError):
    """One or more ranks died; the message is the first cause with that rank's coordinates."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
