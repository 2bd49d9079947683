"""Restarts a failed job from its last checkpoint: when, after which pause, and when not to. Starts nothing itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from megalite.errors import LaunchError

# Not failures (0, 75, 76), the same again (2), or an end that somebody asked for: Ctrl-C (130), SIGUSR1 (138), a closed
# terminal (129), a closed stdout (141), SIGTERM (143).
FINAL_CODES = frozenset({0, 2, 75, 76, 129, 130, 138, 141, 143})

_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How one attempt of a job ended.

    cause: the first cause, "" if the ranks have printed it. step: the last one that a rank told or recorded; None if
    it came to none. checkpoint: the step of the newest published checkpoint; None without one. started: False if the
    preflight stopped it before a rank started. copied: whether the ranks kept copies in memory, which may be newer.
    final: whether another start would not be wanted: the job was told to end, or its command restarts its ranks itself.
    """

    exit_code: int
    cause: str
    step: int | None = None
    checkpoint: int | None = None
    started: bool = True
    copied: bool = False
    final: bool = False

    @property
    def failed(self) -> bool:
        """Whether another attempt could end otherwise."""
        return not self.final and (self.exit_code not in FINAL_CODES or not self.started)


class Restarts:
    """Decides after each attempt whether the job is started again; `most`: the number of restarts."""

    def __init__(self, most: int):
        self._most = most
        self._ended: list[Ended] = []
        self._in_vain = 0  # the last attempts that ended with the same newest checkpoint
        self.last_line = ""
        """Why there is no further attempt: one line; empty if none was needed or allowed."""

    def pause_after(self, ended: Ended) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is none.

        They double while attempts publish no new checkpoint: a job that goes on is not delayed by its earlier failures.
        """
        earlier = [each for each in self._ended if each.started]
        stands = bool(self._ended) and not _goes_on(self._ended[-1], ended)
        self._in_vain = self._in_vain + 1 if stands else 1
        self._ended.append(ended)
        tries = len(self._ended)
        self.last_line = ""
        if not ended.failed or not self._most:
            return None
        if tries > self._most:
            self.last_line = f"no restart: all {self._most} are used (--restarts, launch.restarts)"
            return None
        if ended.started and earlier and _same_place(ended, earlier[-1]):
            place = "before its first step" if ended.step is None else f"at step {ended.step}"
            self.last_line = f"no restart: the job failed twice {place}, with no new checkpoint in between"
            return None
        return float(min(2 ** (self._in_vain - 1), _LONGEST_PAUSE_SECONDS))

    def announcement(self, pause_seconds: float) -> str:
        """Return the line before the next attempt: cause, number, checkpoint."""
        ended, number = self._ended[-1], len(self._ended)
        start = (
            "from the beginning"
            if ended.checkpoint is None
            else f"from the checkpoint of step {ended.checkpoint}"
        )
        if ended.copied:
            start += " or a newer copy in memory"
        return f"restart {number} of {self._most} in {pause_seconds:g} s, {start}, after: {one_line(ended.cause)}"

    def summary(self) -> str:
        """Return a line on the attempts before the last; empty if there was only one."""
        failed = [each for each in self._ended[:-1] if each.failed]
        if not failed:
            return ""
        causes = dict.fromkeys(one_line(each.cause) for each in failed)
        attempts = "1 earlier attempt" if len(failed) == 1 else f"{len(failed)} earlier attempts"
        return f"{attempts} failed: {'; '.join(causes)}"


def run_with_restarts(
    attempt: Callable[[int], Ended],
    restarts: int,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Run a job until it ends for good; return how it ended.

    attempt: starts the job, for the first time with 0, and returns its end. A LaunchError of the first attempt is the
    user's to mend and is raised; of a later one it is a failed attempt, as the input was right before.
    """
    policy, number = Restarts(restarts), 0
    newest: int | None = None
    while True:
        try:
            ended = attempt(number)
        except LaunchError as error:
            if number == 0:
                raise
            ended = Ended(error.exit_code, str(error), checkpoint=newest, started=False)
        newest = ended.checkpoint if ended.checkpoint is not None else newest
        ended = replace(ended, checkpoint=newest)
        pause = policy.pause_after(ended)
        if pause is None:
            for line in (policy.summary(), policy.last_line):
                if line:
                    say(line)
            return ended
        say(policy.announcement(pause))
        sleep(pause)
        number += 1


def one_line(cause: str) -> str:
    """Return the first line of a cause, at most 200 characters."""
    first = cause.strip().splitlines()[0] if cause.strip() else "the failure above"
    return first if len(first) <= 200 else f"{first[:197]}..."


def _goes_on(earlier: Ended, later: Ended) -> bool:
    """Whether an attempt came further than the one before: to a new checkpoint, or with copies to a later step."""
    further = later.copied and (later.step or 0) > (earlier.step or 0)
    return further or later.checkpoint != earlier.checkpoint


def _same_place(first: Ended, other: Ended) -> bool:
    return first.step == other.step and first.checkpoint == other.checkpoint
