"""The figures of a disturbed job: goodput by its three factors, lost steps, and where the time of a recovery goes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megalite.verify.chaos.disturbed import InjectedFault
from megalite.verify.chaos.watch import Attempt

CAUSE_SECONDS = 5.0
"""In this time the first cause of a failure should be on the screen."""
# One fault ends all ranks or the whole job, and has no rank to be named.
_NO_RANK = ("preempt", "full-disk", "drop-link", "flip-checkpoint")
# Faults that do not show at once -> when they do.
_LATER = {
    "stop": "a hang shows after monitor.hang_seconds",
    "flip-parameter": "a flipped weight shows at the next self-check",
}


@dataclass(frozen=True)
class Goodput:
    """The share of the time that became progress, from the first step of a job to its last.

    available: of the time, in which steps are made. kept: of the steps that were made. efficiency: the time of as many
    steps of the calm job, over the time in which steps were made. Their product is steps x calm step time / time.
    """

    seconds: float
    up_seconds: float
    steps_made: int
    steps_kept: int
    calm_step_seconds: float

    @property
    def available(self) -> float:
        return self.up_seconds / self.seconds

    @property
    def kept(self) -> float:
        return self.steps_kept / self.steps_made

    @property
    def efficiency(self) -> float:
        return self.steps_made * self.calm_step_seconds / self.up_seconds

    @property
    def share(self) -> float:
        return self.available * self.kept * self.efficiency


@dataclass(frozen=True)
class Recovery:
    """The outcome of a fault. Times in seconds from the fault to the first step behind it; None: it ended no attempt.

    detect: until its first cause was on the screen, None where nothing was there to say it. start: until all ranks are
    processes. load: until the weights are there. first_step: until the end of a step. cause: its first line.
    named: whether the cause names the rank; None where no rank is at fault.
    """

    at: float
    kind: str
    rank: int
    step: int
    detail: str
    outcome: str
    by_hand: bool
    lost_steps: int | None = None
    seconds: float | None = None
    detect: float | None = None
    start: float | None = None
    load: float | None = None
    first_step: float | None = None
    cause: str = ""
    named: bool | None = None
    ranks: int | None = None


def goodput_of(attempts: Sequence[Attempt], calm_step_seconds: float | None) -> Goodput | None:
    """Return the goodput of a job; None if it made no step. calm_step_seconds: None: the median of its own steps."""
    made = [attempt for attempt in attempts if attempt.steps]
    if not made:
        return None
    up = sum(_until(attempt) - _from(attempt) for attempt in made)
    seconds = _until(made[-1]) - _from(made[0])
    steps = [step for attempt in made for step in attempt.steps]
    calm = calm_step_seconds or median(step.seconds for step in steps)
    return Goodput(seconds, up, len(steps), steps[-1].step - made[0].resumed, calm)


def step_seconds(attempts: Sequence[Attempt]) -> float | None:
    """Return the mean time from step to step of a calm job, with its saves; None for fewer than two steps."""
    steps = [step for attempt in attempts for step in attempt.steps]
    return (steps[-1].at - steps[0].at) / (len(steps) - 1) if len(steps) > 1 else None


def recovery_of(fault: InjectedFault, attempts: Sequence[Attempt], began: float) -> Recovery:
    """Return what became of a fault. began: the time.monotonic from which it is counted."""
    hit = attempts[fault.attempt]
    known = Recovery(
        at=fault.at - began,
        kind=fault.fault.kind,
        rank=fault.fault.rank,
        step=fault.step,
        detail=fault.detail,
        outcome=fault.outcome or "the run ended first",
        by_hand=fault.by_hand,
    )
    after = next((attempt for attempt in attempts[fault.attempt + 1 :] if attempt.steps), None)
    if after is None or fault.until is not None or not fault.outcome:
        return known
    assert after.ranks_at is not None and after.loaded_at is not None
    shown = hit.cause_at if hit.cause_at is not None and hit.cause_at >= fault.at else None
    first = after.steps[0].at
    rankless = known.kind in _NO_RANK or shown is None
    return Recovery(
        **{
            **asdict(known),
            "lost_steps": hit.steps[-1].step - after.resumed,
            "seconds": first - fault.at,
            "detect": None if shown is None else shown - fault.at,
            "start": after.ranks_at - (fault.at if shown is None else shown),
            "load": after.loaded_at - after.ranks_at,
            "first_step": first - after.loaded_at,
            "cause": hit.cause.splitlines()[0] if shown is not None else "",
            "named": None if rankless else f"rank {known.rank} (" in hit.cause,
            "ranks": after.number_of_ranks,
        }
    )


def summary_lines(goodput: Goodput | None, recoveries: Sequence[Recovery], ranks: int) -> list[str]:
    """Return the figures as lines for people. ranks: of the layout in which the job began."""
    if goodput is None:
        return ["the job made no step"]
    lines = [
        f"goodput {goodput.share:.1%} = {goodput.available:.1%} of the time available x {goodput.kept:.1%} of the steps"
        f" kept x {goodput.efficiency:.1%} efficiency",
        f"{goodput.steps_kept:,} steps in {goodput.seconds:.1f} s; {goodput.steps_made - goodput.steps_kept:,} more"
        f" were made and lost; a calm step takes {goodput.calm_step_seconds * 1e3:.1f} ms",
    ]
    if goodput.efficiency > 1:
        lines.append(
            "efficiency above 100%: a calm step took longer than a step of the disturbed job, by chance or by another "
            "load on this machine"
        )
    lines += ["", "fault            n  outcome"]
    counts = Counter((each.kind, each.outcome) for each in recoveries)
    lines += [f"{kind:<16}{count:>2}  {outcome}" for (kind, outcome), count in sorted(counts.items())]
    whole = [each for each in recoveries if each.seconds is not None]
    for title, some in (
        ("the same layout", [each for each in whole if each.ranks == ranks]),
        ("a smaller layout", [each for each in whole if each.ranks != ranks]),
    ):
        if some:
            lines += ["", f"{len(some)} recoveries in {title}, seconds:{'median':>13}{'longest':>10}"]
            lines += [_times(name, some) for name in ("detect", "start", "load", "first_step", "seconds")]
            lines.append(_times("lost_steps", some, digits=0))
    lines += ["", _causes_line(whole)]
    return lines


def _causes_line(recoveries: Sequence[Recovery]) -> str:
    """Return how many first causes were on the screen in time, and how many named the rank."""
    shown = [each for each in recoveries if each.detect is not None]
    # A hang shows after monitor.hang_seconds, and a bit at the next self-check.
    later = sorted({each.kind for each in shown if each.kind in _LATER})
    detects = [each.detect for each in shown if each.detect is not None and each.kind not in _LATER]
    named = [each.named for each in recoveries if each.named is not None]
    apart = f" (without {' and '.join(later)}: {', '.join(map(_LATER.__getitem__, later))})" if later else ""
    in_time = sum(detect <= CAUSE_SECONDS for detect in detects)
    return (
        f"first cause on the screen within {CAUSE_SECONDS:g} s: {in_time} of {len(detects)}{apart}; "
        f"the rank named: {sum(named)} of {len(named)}"
    )


def document(goodput: Goodput | None) -> dict[str, Any] | None:
    """Return the goodput for programs."""
    if goodput is None:
        return None
    factors = {name: getattr(goodput, name) for name in ("share", "available", "kept", "efficiency")}
    return {**factors, **asdict(goodput)}


def _times(name: str, recoveries: Sequence[Recovery], digits: int = 2) -> str:
    values = [value for each in recoveries if (value := getattr(each, name)) is not None]
    title = {"seconds": "in all", "first_step": "first step", "lost_steps": "lost steps"}.get(name, name)
    if not values:
        return f"  {title:<34}{'-':>10}{'-':>10}"
    return f"  {title:<34}{median(values):>10.{digits}f}{max(values):>10.{digits}f}"


def _from(attempt: Attempt) -> float:
    assert attempt.up_from is not None
    return attempt.up_from


def _until(attempt: Attempt) -> float:
    assert attempt.up_until is not None
    return attempt.up_until
