"""megalite timeline: draw a traced step of a run beside its schedule, and say which stage waited for which."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from megalite.cli.arguments import Parser, add_value, whole_number
from megalite.cli.results import report, wanted
from megalite.cli.timeline_picture import (
    SHOWN_WAITS,
    label,
    milliseconds,
    timeline_svg,
    trace_events,
    wait_text,
)
from megalite.errors import ConfigError, Problem, counted, write_remedy
from megalite.launcher.control.step_trace import TRACES, step_folder
from megalite.planner.timeline import MessageWait, PipelineTimeline, pipeline_timelines
from megalite.planner.traces import TracedStep, read_step


def run(arguments: Sequence[str]) -> int:
    """Run `megalite timeline RUN [--step N] [--out FILE] [--json]`. ConfigError without traces."""
    options = command_parser().parse_args(arguments)
    step = read_step(options.run, options.step)
    timelines = pipeline_timelines(step)
    picture, events = _files(options.run, step, options.out)
    if files := options.out is not None or not wanted():
        _write(picture, picture_of(step))
        _write(events, json.dumps(trace_events(step, timelines)) + "\n")
    report(**_report(step, timelines))
    for line in _lines(step, timelines, options.run):
        print(line)
    if files:
        print(f"picture  {picture}")
        print(f"trace    {events} (open it in ui.perfetto.dev or chrome://tracing)")
        report(picture=picture, trace=events)
    return 0


def picture_of(step: TracedStep) -> str:
    """Return the picture of the slowest pipeline of a traced step, SVG."""
    timelines = pipeline_timelines(step)
    lines = [_sizes(timelines[0]), _bubbles(timelines[0]), *_others(timelines)]
    return timeline_svg(timelines[0], _title(timelines[0]), lines)


def command_parser() -> Parser:
    parser = Parser(prog="megalite timeline", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, trained with monitor.trace_steps")
    add_value(parser, "--step", whole_number(1), "N", "the traced step (default: the last one)")
    about = "the picture, SVG (default: beside the traces); its events for Perfetto are written beside it"
    add_value(parser, "--out", Path, "FILE", about)
    return parser


def _files(run: Path, step: TracedStep, out: Path | None) -> tuple[Path, Path]:
    """Return the paths of the picture and of the events."""
    if out is not None:
        if out.suffix != ".svg":
            named = out.parent / f"{out.stem or 'timeline'}.svg"
            problem = Problem.reset(
                "--out", f"{out} does not end in .svg, and the picture is SVG", f"use {named}", named
            )
            raise ConfigError([problem], "the command line")
        return out, out.with_suffix(".trace.json")
    folder = step_folder(run / TRACES, step.facts.step)
    return folder / "timeline.svg", folder / "trace.json"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = write_remedy(error, full="") or "name another file with --out"
        problem = Problem("--out", f"{path} cannot be written ({error.strerror})", remedy)
        raise ConfigError([problem], "the command line") from error


def _title(timeline: PipelineTimeline) -> str:
    return f"step {timeline.ranks[0].step}: {timeline.ranks[0].schedule}"


def _sizes(timeline: PipelineTimeline) -> str:
    facts = timeline.ranks[0]
    chunks = f" of {facts.chunks} chunks" if facts.chunks > 1 else ""
    batches = "1 micro batch" if facts.micro_batches == 1 else f"{facts.micro_batches} micro batches"
    return f"{counted(facts.stages, 'stage')}{chunks}, {batches}, {milliseconds(timeline.measured.length)}"


def _bubbles(timeline: PipelineTimeline) -> str:
    measured, simulated = timeline.measured.bubble, timeline.simulated.bubble
    formula = "by formula" if timeline.formula_is_published else "of equal stages"
    return f"bubble: {timeline.formula:.1%} {formula}, {simulated:.1%} simulated, {measured:.1%} measured"


def _others(timelines: Sequence[PipelineTimeline]) -> Iterator[str]:
    """Yield which of several pipelines, one for each place on the other axes, is shown, and the bubbles of all."""
    places = [_place(timeline) for timeline in timelines]
    if len(places) > 1:
        place = ", ".join(
            f"{axis} {at}" for axis, at in places[0].items() if any(each[axis] != at for each in places)
        )
        ranks = ", ".join(str(rank.rank) for rank in timelines[0].ranks)
        bubbles = sorted(each.measured.bubble for each in timelines)
        spread = f"{bubbles[0]:.1%} to {bubbles[-1]:.1%}"
        yield f"the slowest of {len(places)} pipelines: {place}, ranks {ranks}; measured in all: {spread}"


def _place(timeline: PipelineTimeline) -> dict[str, int]:
    """Return axis -> the coordinate that all ranks of a pipeline share."""
    return {axis: at for axis, at in timeline.ranks[0].place.items() if axis != "pp"}


def _lines(step: TracedStep, timelines: list[PipelineTimeline], run: Path) -> Iterator[str]:
    timeline = timelines[0]
    yield f"{run}, {_title(timeline)}, {_sizes(timeline)}"
    yield _bubbles(timeline)
    yield from _others(timelines)
    yield ""
    yield "stage   rank  computes     waits   between     after"
    for stage, shares in enumerate(timeline.stages):
        parts = (shares.busy, shares.waits, shares.between, shares.after)
        yield f"{stage:>5}{shares.rank:>7}" + "".join(
            f"{part / timeline.measured.length:>10.1%}" for part in parts
        )
    yield ""
    for wait in timeline.waits[:SHOWN_WAITS]:
        yield f"{wait_text(wait)}, {milliseconds(wait.travel)} of it after {label(wait.made_by)} had ended"
    yield from ("",) if timeline.waits else ()
    yield f"{'phase':<26}{'mean':>14}{'longest':>14}"
    for name, seconds in _phases(step).items():
        longest = max(seconds, key=lambda rank: seconds[rank])
        mean, most = milliseconds(fmean(seconds.values())), milliseconds(seconds[longest])
        yield f"{name:<26}{mean:>14}{most:>14} rank {longest}"
    for host, offset in step.offsets.items():
        if offset:
            yield f"clock of {host}: {offset * 1e3:+.3f} ms, by the step's totals and messages"
    yield ""


def _phases(step: TracedStep) -> dict[str, dict[int, float]]:
    """Return phase -> rank -> its seconds, in the order in which the phases begin."""
    phases: dict[str, dict[int, float]] = {}
    for rank in step.ranks:
        for phase in rank.phases:
            seconds = phases.setdefault(phase.name, {})
            seconds[rank.rank] = seconds.get(rank.rank, 0.0) + phase.end - phase.start
    return phases


def _report(step: TracedStep, timelines: list[PipelineTimeline]) -> dict[str, Any]:
    facts = step.facts
    names = ("step", "schedule", "stages", "micro_batches", "chunks", "world_size", "device")
    return {
        **{name: getattr(facts, name) for name in names},
        "pipelines": [_pipeline_report(timeline) for timeline in timelines],
        "phases": _phases(step),
        "clock_offsets": dict(step.offsets),
    }


def _pipeline_report(timeline: PipelineTimeline) -> dict[str, Any]:
    costs: dict[str, dict[int, float]] = {}
    for _, action in timeline.simulated.starts:
        costs.setdefault(action.kind, {})[action.chunk] = timeline.simulated.costs.of(action)
    return {
        "ranks": [rank.rank for rank in timeline.ranks],
        "place": _place(timeline),
        "bubble": {
            "formula": timeline.formula,
            "simulated": timeline.simulated.bubble,
            "measured": timeline.measured.bubble,
        },
        "seconds": {
            "ideal": timeline.ideal.length,
            "simulated": timeline.simulated.length,
            "measured": timeline.measured.length,
        },
        "costs": costs,
        "stages": [asdict(shares) for shares in timeline.stages],
        "waits": [_wait_report(wait) for wait in timeline.waits],
    }


def _wait_report(wait: MessageWait) -> dict[str, Any]:
    named = {name: getattr(wait, name)._asdict() for name in ("action", "made_by")}
    return {**vars(wait), **named, "seconds": wait.seconds}
