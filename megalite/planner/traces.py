"""Reads the traces of a run's steps, and puts the clocks of its hosts in line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter, ValidationError

from megalite.errors import ConfigError, Problem, listed
from megalite.launcher.control.progress import Activity
from megalite.launcher.control.step_trace import (
    TRACES,
    RankTrace,
    TracedSpan,
    step_folder,
    trace_file,
)
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.schedules import SCHEDULES, Action
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import Message

_AGAIN = "train that step again with monitor.trace_steps, or choose another with --step"
_RANK_TRACE = TypeAdapter(RankTrace)
# The facts that all ranks of a step share.
_COMMON = ("step", "world_size", "schedule", "stages", "micro_batches", "chunks")


@dataclass(frozen=True)
class TracedStep:
    """The traces of all ranks of one step, in rank order.

    offsets: host -> the seconds that were added to its clock.
    """

    ranks: tuple[RankTrace, ...]
    offsets: Mapping[str, float]

    @property
    def facts(self) -> RankTrace:
        """A trace with the facts that all ranks share."""
        return self.ranks[0]

    @property
    def split(self) -> PipelineSplit:
        """The places of the chunks; layers are not known, and each counts as one."""
        return split_of(self.facts)

    @property
    def pipelines(self) -> list[tuple[RankTrace, ...]]:
        """The ranks of each pipeline, in the order of the stages."""
        pipelines: dict[tuple[tuple[str, int], ...], list[RankTrace]] = {}
        for rank in self.ranks:
            place = tuple((axis, at) for axis, at in rank.place.items() if axis != "pp")
            pipelines.setdefault(place, []).append(rank)
        return [tuple(sorted(ranks, key=lambda rank: rank.place["pp"])) for ranks in pipelines.values()]


def split_of(facts: RankTrace) -> PipelineSplit:
    """Return the places of a trace's chunks; each counts as one layer."""
    layers = tuple(range(chunk, chunk + 1) for chunk in range(facts.stages * facts.chunks))
    return PipelineSplit(layers, facts.stages, SCHEDULES[facts.schedule].v_shaped)


def traced_steps(run: Path) -> list[int]:
    """Return the steps of which a run folder has traces, ascending."""
    named = (re.fullmatch(r"step-(\d+)", folder.name) for folder in (run / TRACES).glob("step-*"))
    return sorted(int(match[1]) for match in named if match)


def read_step(run: Path, step: int | None = None) -> TracedStep:
    """Return the traces of a step, by default of the last traced one. Raises ConfigError with the remedy."""
    steps = traced_steps(run)
    if not steps:
        message = f"{run} has no traces" if run.is_dir() else "there is no such folder"
        remedy = "name a run folder that was trained with --monitor.trace_steps '[10, 11]'"
        raise _error(run, "RUN", message, remedy)
    if step is not None and step not in steps:
        remedy = f"use one of {listed([*map(str, steps)])}, or train with --monitor.trace_steps '[{step}]'"
        raise _error(run, "--step", f"step {step} was not traced", remedy)
    traces, step = run / TRACES, steps[-1] if step is None else step
    first = _read_rank(run, trace_file(traces, step, 0))
    missing = [
        f"rank-{rank:05}.json"
        for rank in range(first.world_size)
        if not trace_file(traces, step, rank).exists()
    ]
    if missing:
        message = f"{len(missing)} of {first.world_size} ranks left no trace: {listed(missing)}"
        remedy = f"copy their files from the ranks' hosts, or {_AGAIN}"
        raise _error(run, step_folder(traces, step).name, message, remedy)
    ranks = [first, *(_read_rank(run, trace_file(traces, step, rank)) for rank in range(1, first.world_size))]
    for rank in ranks:
        if any(getattr(rank, name) != getattr(first, name) for name in _COMMON):
            message = f"is the trace of another run than rank 0's ({_said(rank)}, not {_said(first)})"
            raise _error(run, f"rank-{rank.rank:05}.json", message, _AGAIN)
    offsets = clock_offsets(ranks)
    moved = (replace(rank, started_at=rank.started_at + offsets[rank.host]) for rank in ranks)
    return TracedStep(tuple(moved), offsets)


def _read_rank(run: Path, path: Path) -> RankTrace:
    """Return a rank's trace; a ConfigError if its file is missing, broken, or lacks actions of the schedule."""
    key = f"{path.parent.name}/{path.name}"
    try:
        trace = _RANK_TRACE.validate_json(path.read_bytes())
        order = orders_of(trace.schedule, trace.stages, trace.micro_batches, trace.chunks)[trace.place["pp"]]
    except FileNotFoundError:
        raise _error(
            run, key, "the file is missing", f"copy it from the host of its rank, or {_AGAIN}"
        ) from None
    except (OSError, ValidationError, ValueError, LookupError) as error:
        first = str(error).splitlines()[0]
        raise _error(
            run, key, f"is not a trace of this version ({first})", f"delete it, and {_AGAIN}"
        ) from None
    done = tuple(Action(*span[:3]) for span in trace.actions)
    chunks = range(trace.stages * trace.chunks)
    if any(made_in(wait) not in chunks or wait.micro_batch >= trace.micro_batches for wait in trace.waits):
        raise _error(run, key, "waits for a message that its schedule does not have", _AGAIN)
    if done != order:
        same = next(
            (at for at, (one, other) in enumerate(zip(done, order, strict=False)) if one != other), len(done)
        )
        message = f"has {len(done)} actions where {trace.schedule} has {len(order)}, the first {same} alike"
        raise _error(run, key, message, _AGAIN)
    return trace


def _said(rank: RankTrace) -> str:
    return (
        f"{rank.schedule}, {rank.stages} stages, {rank.micro_batches} micro batches, {rank.world_size} ranks"
    )


def _error(run: Path, key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key, message, remedy)], str(run))


def clock_offsets(ranks: Sequence[RankTrace]) -> dict[str, float]:
    """Return host -> the seconds to add to its clock, so that it agrees with that of rank 0's host.

    All ranks leave the collective of the step's totals together: the first estimate. The messages bound it, as in the
    Network Time Protocol (Mills 1991): none arrives before the action that made it has ended.
    """
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    offsets = {hosts[0]: 0.0}
    leaving = {host: _leaving_totals(ranks, host) for host in hosts}
    reference = leaving[hosts[0]]
    for host in hosts[1:]:
        here = leaving[host]
        estimate = 0.0 if here is None or reference is None else reference - here
        least, most = float("-inf"), float("inf")
        for sent, source, received, target in _messages(ranks):
            if target == host and source in offsets:
                least = max(least, sent + offsets[source] - received)
            elif source == host and target in offsets:
                most = min(most, received + offsets[target] - sent)
        # Drifting clocks may leave no room between the bounds.
        offsets[host] = min(max(estimate, least), most) if least <= most else (least + most) / 2
    return offsets


def _leaving_totals(ranks: Sequence[RankTrace], host: str) -> float | None:
    ends = [
        rank.started_at + phase.end
        for rank in ranks
        if rank.host == host
        for phase in rank.phases
        if phase.name == Activity.TOTALLING.value
    ]
    return median(ends) if ends else None


def _messages(ranks: Sequence[RankTrace]) -> Iterator[tuple[float, str, float, str]]:
    """Yield the end of the action that made a message, its host, the end of the wait for it, and the waiting host."""
    made = {
        (*_peers(rank), span.kind if span.kind == "F" else "B", span.chunk, span.micro_batch): (rank, span)
        for rank in ranks
        for span in rank.actions
        if span.kind != "W"
    }
    for rank in ranks:
        for span in rank.waits:
            source, action = made[(*_peers(rank), span.kind, made_in(span), span.micro_batch)]
            yield source.started_at + action.end, source.host, rank.started_at + span.end, rank.host


def _peers(rank: RankTrace) -> tuple[int, ...]:
    """Return what the ranks of one pipeline have in common."""
    return tuple(at for axis, at in rank.place.items() if axis != "pp")


def made_in(wait: TracedSpan) -> int:
    """Return the chunk whose action made the message that was waited for."""
    return Message("F" if wait.kind == "F" else "B", wait.chunk, wait.micro_batch).made_in
