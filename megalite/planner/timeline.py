"""A traced step beside its schedule: ideal, simulated with the step's own costs, and measured; who waited for whom."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megalite.launcher.control.step_trace import RankTrace
from megalite.planner.bubble import bubble, published_bubble
from megalite.planner.traces import TracedStep, made_in
from megalite.topology.schedule_timeline import UNIT, Costs, Timeline, orders_of, play
from megalite.topology.schedules import Action


@dataclass(frozen=True)
class MessageWait:
    """A stage's wait for a message, in seconds from the pipeline's first action.

    action: what the stage runs once the message is there. made_by: the action that made it, on the stage `source`.
    travel: the seconds of the wait that passed after `made_by` had ended.
    """

    stage: int
    action: Action
    source: int
    made_by: Action
    start: float
    end: float
    travel: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class StageShares:
    """Seconds of a stage, which add up to the length of the step's schedule.

    waits: for messages. between: between its actions, without a message to wait for. after: behind its last action.
    """

    rank: int
    busy: float
    waits: float
    between: float
    after: float


@dataclass(frozen=True)
class PipelineTimeline:
    """One pipeline in a traced step. All three timelines are in seconds and do the same work.

    ideal: equal stages, a backward of two forwards. simulated: the mean measured duration of each kind of action in
    each chunk. Neither has transfers. measured: by the ranks' stamps, from the first action's start.
    waits: the largest first.
    """

    ranks: tuple[RankTrace, ...]
    ideal: Timeline
    simulated: Timeline
    measured: Timeline
    waits: tuple[MessageWait, ...]
    stages: tuple[StageShares, ...]

    @property
    def formula(self) -> float:
        """The bubble of equal stages, as `megalite plan` has it."""
        return bubble(*_shape(self.ranks[0]))

    @property
    def formula_is_published(self) -> bool:
        """Whether the formula is the schedule's published one, not the simulation of equal stages."""
        return published_bubble(*_shape(self.ranks[0])) is not None


def pipeline_timelines(step: TracedStep) -> list[PipelineTimeline]:
    """Return the timeline of each pipeline, the slowest first."""
    timelines = [_timeline(ranks, step) for ranks in step.pipelines]
    return sorted(timelines, key=lambda timeline: -timeline.measured.length)


def _shape(facts: RankTrace) -> tuple[str, int, int, int]:
    return facts.schedule, facts.stages, facts.micro_batches, facts.chunks


def _timeline(ranks: tuple[RankTrace, ...], step: TracedStep) -> PipelineTimeline:
    starts, durations = {}, {}
    for stage, rank in enumerate(ranks):
        for span in rank.actions:
            action = Action(*span[:3])
            starts[stage, action] = rank.started_at + span.start
            durations[action] = span.end - span.start
    first = min(starts.values())
    shifted = {placed: start - first for placed, start in starts.items()}
    measured = Timeline(shifted, len(ranks), Costs(durations=durations))
    orders = orders_of(*_shape(ranks[0]))
    unit = sum(durations.values()) / sum(map(UNIT.of, durations))
    ideal = Costs(durations={action: unit * UNIT.of(action) for action in durations})
    simulated = Costs(durations=mean_durations(durations))
    waits = tuple(sorted(_waits(ranks, step, measured, first), key=lambda wait: -wait.seconds))
    shares = tuple(_shares(stage, rank.rank, measured, waits) for stage, rank in enumerate(ranks))
    return PipelineTimeline(ranks, play(orders, ideal), play(orders, simulated), measured, waits, shares)


def mean_durations(durations: Mapping[Action, float]) -> dict[Action, float]:
    """Return for each action the mean duration of its kind in its chunk, over the micro batches."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for action, seconds in durations.items():
        groups[action.kind, action.chunk].append(seconds)
    means = {group: fmean(seconds) for group, seconds in groups.items()}
    return {action: means[action.kind, action.chunk] for action in durations}


def _waits(
    ranks: Sequence[RankTrace], step: TracedStep, measured: Timeline, first: float
) -> Iterator[MessageWait]:
    """Yield the waits of all stages, as far as they lie behind the first action's start."""
    # B and I both wait for a gradient and make one.
    actions = {
        (action.kind == "F", action.chunk, action.micro_batch): action
        for _, action in measured.starts
        if action.kind != "W"
    }
    for stage, rank in enumerate(ranks):
        for wait in rank.waits:
            forward = wait.kind == "F"
            action = actions[forward, wait.chunk, wait.micro_batch]
            made_by = actions[forward, made_in(wait), wait.micro_batch]
            source = step.split.stage_of(made_by.chunk)
            start = max(0.0, rank.started_at + wait.start - first)
            end = max(start, rank.started_at + wait.end - first)
            travel = max(0.0, end - max(start, measured.ends(source, made_by)))
            yield MessageWait(stage, action, source, made_by, start, end, travel)


def _shares(stage: int, rank: int, measured: Timeline, waits: Sequence[MessageWait]) -> StageShares:
    actions = [action for at, action in measured.starts if at == stage]
    busy = sum(map(measured.costs.of, actions))
    waited = sum(wait.seconds for wait in waits if wait.stage == stage)
    after = measured.length - max(measured.ends(stage, action) for action in actions)
    return StageShares(rank, busy, waited, measured.length - busy - waited - after, after)
