"""Which faults a chaos run has, and when: drawn from a seed, or chosen. No torch."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS: Mapping[str, str] = {
    "kill": "SIGKILL to a rank",
    "stop": "SIGSTOP to a rank, for which all others wait",
    "slow": "a rank has a share of its time alone",
    "preempt": "SIGTERM to the job, as a batch system sends it",
    "full-disk": "no file of any rank can grow",
    "drop-link": "a TCP connection between two ranks ends",
    "flip-checkpoint": "a rank is killed, then a bit of the newest checkpoint flips",
    "flip-parameter": "a bit of a weight flips on a rank",
    "shrink": "all processes are killed, and fewer ranks are left",
}
"""Kind -> meaning."""
SLOW_SECONDS = 30.0
"""The time for which a rank is slow."""
# Kills come every n-th second, up to this share of n earlier or later.
_JITTER = 0.25
# The faults of a kind with a number lie in equal parts of the time, in the middle of each.
_MIDDLE = (0.2, 0.8)


@dataclass(frozen=True, order=True)
class Fault:
    """One fault. at: seconds from the job's first step. factor: how many times slower a slow rank is."""

    at: float
    kind: str
    rank: int
    factor: float = 1.0


@dataclass(frozen=True)
class FaultPlan:
    """The faults that are asked for.

    seconds: of the whole time. kill_every: None: no kills but those in `numbers` and `chosen`. numbers: kind -> how
    often. chosen: (kind, seconds). slow: (rank, factor) of each slow rank.
    """

    seconds: float
    kill_every: float | None = None
    numbers: Mapping[str, int] | None = None
    chosen: Sequence[tuple[str, float]] = ()
    slow: Sequence[tuple[int, float]] = ()

    def drawn(self, ranks: int, seed: int) -> list[Fault]:
        """Return the faults in their order. Each kind is drawn by itself: another kind does not move the others."""
        times: list[tuple[str, float]] = list(self.chosen)
        if self.kill_every is not None:
            chance = _chance(seed, "kill every")
            kills = int((self.seconds - _JITTER * self.kill_every) // self.kill_every)
            times += [
                ("kill", self.kill_every * (number + chance.uniform(1 - _JITTER, 1 + _JITTER)))
                for number in range(kills)
            ]
        for kind, number in (self.numbers or {}).items():
            chance, part = _chance(seed, f"{kind} times"), self.seconds / max(1, number)
            times += [(kind, part * (place + chance.uniform(*_MIDDLE))) for place in range(number)]
        hit = {kind: _chance(seed, f"{kind} ranks") for kind in KINDS}
        faults = [Fault(at, kind, hit[kind].randrange(ranks)) for kind, at in sorted(times, key=_by_time)]
        part = self.seconds / max(1, len(self.slow))
        for place, (rank, factor) in enumerate(self.slow):
            at = part * (place + _chance(seed, f"slow {place}").uniform(*_MIDDLE))
            faults.append(Fault(at, "slow", rank, factor))
        return sorted(faults)


def _chance(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")


def _by_time(fault: tuple[str, float]) -> float:
    return fault[1]
