"""The picture of a traced step: one SVG, in any width, light and dark; and its events for Perfetto."""

from collections.abc import Iterator, Mapping
from math import floor, log10
from typing import Any
from xml.sax.saxutils import escape

from megalite.planner.timeline import MessageWait, PipelineTimeline
from megalite.planner.traces import TracedStep
from megalite.topology.schedule_timeline import Timeline
from megalite.topology.schedules import Action

SHOWN_WAITS = 5
_WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
# Places in percent of the width, so that the picture fits any; heights and letters in pixels.
_LEFT, _RIGHT = 15.0, 98.0
_BAR, _STEP, _LINE = 17, 20, 18
# A label needs so many pixels a letter; the picture may be as narrow, and shows more labels from this width on.
_LETTER, _NARROW, _WIDE = 8, 400, 1000
_TICKS = 5
_STYLE = """
svg { color-scheme: light dark; font-family: 'DejaVu Sans', Verdana, sans-serif; font-size: 12px; }
.paper { fill: #ffffff; } .row { fill: #eef1f4; } text { fill: #1f2328; } .pale { fill: #59636e; }
.F { fill: #9ecbff; } .B, .I { fill: #b4e2a8; } .W { fill: #ffd59a; } .wait { fill: #f4b6b0; }
.bold { font-weight: bold; } .mark { font-size: 10px; text-anchor: middle; pointer-events: none; }
rect.F, rect.B, rect.I, rect.W { stroke: #ffffff; stroke-width: 0.7; }
line { stroke: #c4cad1; } .wide { display: none; }
@media (min-width: 1000px) { .wide { display: inline; } }
@media (max-width: 620px) { svg { font-size: 10px; } .bold { font-size: 11px; } .long { display: none; } }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } .row { fill: #1c2128; } text { fill: #e6edf3; } .pale { fill: #9198a1; }
.F { fill: #1f5fa8; } .B, .I { fill: #2b6a33; } .W { fill: #8a5a12; } .wait { fill: #7d2f2b; } line { stroke: #3d444d; }
rect.F, rect.B, rect.I, rect.W { stroke: #0d1117; }
}
"""


def timeline_svg(timeline: PipelineTimeline, title: str, lines: list[str]) -> str:
    """Draw for each stage the ideal, the simulated and the measured schedule, one above the other.

    lines: the text below the title.
    """
    rows = {"ideal": timeline.ideal, "simulated": timeline.simulated, "measured": timeline.measured}
    length = max(row.length for row in rows.values())
    parts = [_text(2, 24, title, "bold")]
    y = 24.0
    for line in lines:
        y += _LINE
        parts.append(_text(2, y, line))
    y += 12
    parts += _legend(timeline, y)
    y += 26
    top = y
    boxes: list[str] = []
    for stage, shares in enumerate(timeline.stages):
        boxes.append(_text(2, y + 12, f"stage {stage}", "bold"))
        boxes.append(_text(_LEFT, y + 12, f"rank {shares.rank}", "pale"))
        y += _STEP
        for name, row in rows.items():
            waits = [wait for wait in timeline.waits if wait.stage == stage] if name == "measured" else []
            boxes += _row(name, row, waits, stage, y, length)
            y += _STEP
        y += 6
    parts += [*_ticks(length, top, y), *boxes]
    y += 24
    for wait in timeline.waits[:SHOWN_WAITS]:
        y += _LINE
        parts.append(_text(2, y, wait_text(wait)))
    return _svg(title, " ".join(lines), y + 16, parts)


def wait_text(wait: MessageWait) -> str:
    """Return a wait as a sentence."""
    made = f"stage {wait.source}'s {label(wait.made_by)} (chunk {wait.made_by.chunk})"
    return f"stage {wait.stage} waited {milliseconds(wait.seconds)} for {made}"


def label(action: Action) -> str:
    """Return the short name of an action: F3 is the forward of micro batch 3."""
    return f"{action.kind}{action.micro_batch}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _row(
    name: str, row: Timeline, waits: list[MessageWait], stage: int, y: float, length: float
) -> Iterator[str]:
    yield _text(2, y + 13, name, "pale")
    yield _box(_LEFT, y, _RIGHT - _LEFT, "row", "")
    for wait in waits:
        yield _box(*_place(wait.start, wait.end, y, length), "wait", wait_text(wait))
    chunks = sorted({action.chunk for at, action in row.starts if at == stage})
    for (at, action), start in row.starts.items():
        if at != stage:
            continue
        end = row.ends(at, action)
        x, _, width = _place(start, end, y, length)
        said = f"{action}: {milliseconds(end - start)} from {milliseconds(start)} on"
        yield _box(x, y, width, action.kind, said, 1 - 0.5 * chunks.index(action.chunk) / len(chunks))
        mark = str(action.micro_batch)
        needed = _LETTER * len(mark)
        if width * _WIDE / 100 >= needed:
            shown = "mark" if width * _NARROW / 100 >= needed else "mark wide"
            yield _text(x + width / 2, y + 13, mark, shown)


def _place(start: float, end: float, y: float, length: float) -> tuple[float, float, float]:
    span = (_RIGHT - _LEFT) / length
    return _LEFT + start * span, y, (end - start) * span


def _legend(timeline: PipelineTimeline, y: float) -> Iterator[str]:
    kinds = {action.kind for _, action in timeline.measured.starts}
    shown: list[tuple[str, str, str]] = [
        (kind, kind, f": {word}") for kind, word in _WORDS.items() if kind in kinds
    ]
    shown.append(("wait", "waits", ""))
    if timeline.ranks[0].chunks > 1:
        shown.append(("", "paler", ": a later chunk"))
    for place, (kind, name, word) in enumerate(shown):
        x = 2 + place * 96 / len(shown)
        if kind:
            yield f"<rect x='{x:.3f}%' y='{y:g}' width='12' height='12' class='{kind}'/>"
        long = f"<tspan class='long'>{word}</tspan>"
        yield f"<text x='{x:.3f}%' dx='{17 if kind else 0}' y='{y + 10:g}'>{name}{long}</text>"


def _ticks(length: float, top: float, bottom: float) -> Iterator[str]:
    size = 10 ** floor(log10(length / _TICKS))
    size = next(size * factor for factor in (1, 2, 5, 10) if length / (size * factor) <= _TICKS)
    for number in range(int(length / size) + 1):
        x, _, _ = _place(number * size, number * size, top, length)
        yield f"<line x1='{x:.3f}%' x2='{x:.3f}%' y1='{top:g}' y2='{bottom:g}'/>"
        yield f"<text x='{x:.3f}%' y='{bottom + 14:g}' class='pale' text-anchor='middle'>{number * size * 1e3:g}</text>"
    yield _text(2, bottom + 14, "ms", "pale")


def _box(x: float, y: float, width: float, kind: str, said: str, opacity: float = 1.0) -> str:
    shade = "" if opacity == 1 else f" fill-opacity='{opacity:.2f}'"
    inner = f"<title>{escape(said)}</title>" if said else ""
    place = f"x='{x:.3f}%' y='{y:g}' width='{width:.3f}%' height='{_BAR}'"
    return f"<rect {place} class='{kind}'{shade}>{inner}</rect>"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f" class='{kind}'" if kind else ""
    return f"<text x='{x:.3f}%' y='{y:g}'{named}>{escape(text)}</text>"


def _svg(title: str, said: str, height: float, parts: list[str]) -> str:
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='100%' height='{height:g}' role='img' "
        "aria-labelledby='timeline-title timeline-text'>",
        f"<title id='timeline-title'>{escape(title)}</title>",
        f"<desc id='timeline-text'>{escape(said)}</desc>",
        f"<style>{_STYLE}</style>",
        "<rect width='100%' height='100%' class='paper'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def trace_events(step: TracedStep, timelines: list[PipelineTimeline]) -> dict[str, Any]:
    """Return the step in the Trace Event Format of Chrome and Perfetto: one process a stage, one thread a rank."""
    first = min(rank.started_at for rank in step.ranks)
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        sources = {
            (wait.stage, wait.action.kind == "F", wait.action.chunk, wait.action.micro_batch): wait
            for wait in timeline.waits
        }
        for stage, rank in enumerate(timeline.ranks):
            own = {"pid": stage, "tid": rank.rank}
            for what, name in (("process_name", f"stage {stage}"), ("thread_name", f"rank {rank.rank}")):
                events.append({"name": what, "ph": "M", **own, "args": {"name": name}})
            base = (rank.started_at - first) * 1e6
            for phase in rank.phases:
                events.append(_event(phase.name, "phase", base, phase.start, phase.end, own))
            for span in rank.actions:
                name = f"{span.kind}{span.micro_batch} chunk {span.chunk}"
                events.append(_event(name, "action", base, span.start, span.end, own))
            for span in rank.waits:
                wait = sources[stage, span.kind == "F", span.chunk, span.micro_batch]
                name = f"wait for {label(wait.made_by)} of stage {wait.source}"
                events.append(_event(name, "wait", base, span.start, span.end, own))
            for span in rank.sends:
                events.append(_event("wait for a send", "wait", base, span.start, span.end, own))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    name: str, category: str, base: float, start: float, end: float, own: Mapping[str, int]
) -> dict[str, Any]:
    # Both ends are rounded: Perfetto wants what lies in a phase to end with it.
    first, last = round(base + start * 1e6, 3), round(base + end * 1e6, 3)
    return {"name": name, "cat": category, "ph": "X", "ts": first, "dur": round(last - first, 3), **own}
