"""The picture of a disturbed job: when it stepped, which steps were lost, how it recovered, and each fault."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from megalite.verify.chaos.account import Recovery
from megalite.verify.chaos.watch import Attempt

# In pixels of the view box, which fits any width.
_WIDTH, _LEFT, _RIGHT = 960.0, 62.0, 944.0
_BAND, _ROW, _LINE = 22, 58, 18
_MOST_ROWS = 8
_ROW_SECONDS = (10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
_TICKS = 6
_WORDS = {
    "kept": "steps kept",
    "lost": "steps lost",
    "detect": "until the cause is known",
    "start": "until ranks are there",
    "load": "until the first step",
}
_STYLE = """
svg { color-scheme: light dark; font-family: 'DejaVu Sans', Verdana, sans-serif; font-size: 12px; }
.paper { fill: #ffffff; } text { fill: #1f2328; } .pale { fill: #59636e; } .bold { font-weight: bold; font-size: 14px; }
.kept { fill: #8fce8a; } .lost { fill: #ffb454; } .detect { fill: #e5534b; } .start { fill: #b7bdc4; }
.load { fill: #9ecbff; } .tick { stroke: #c4cad1; } .fault { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } text { fill: #e6edf3; } .pale { fill: #9198a1; } .tick { stroke: #3d444d; }
.kept { fill: #2b6a33; } .lost { fill: #9a5b00; } .detect { fill: #b3322b; } .start { fill: #545d68; }
.load { fill: #1f5fa8; } .fault { stroke: #e6edf3; }
}
"""


class TimePart(NamedTuple):
    """A part of the time. kind: one of the words of the legend. Times in seconds from the job's first step."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class _Scale:
    seconds: float
    top: float

    def place(self, at: float) -> tuple[int, float]:
        """Return the row of a time, and its x."""
        row = int(at // self.seconds)
        return row, _LEFT + (at - row * self.seconds) / self.seconds * (_RIGHT - _LEFT)

    def y(self, row: int) -> float:
        return self.top + row * _ROW


def spans(attempts: Sequence[Attempt]) -> Iterator[TimePart]:
    """Yield the parts of the time in their order, without gaps, from the first step of a job to its last."""
    made = [attempt for attempt in attempts if attempt.steps]
    if not made:
        return
    began, before = made[0].up_from, None
    assert began is not None
    for place, attempt in enumerate(made):
        first, last = attempt.up_from, attempt.up_until
        assert first is not None and last is not None
        if before is not None:
            marks = {"detect": made[place - 1].cause_at, "start": attempt.ranks_at, "load": first}
            for kind, mark in marks.items():
                # An attempt that ended without a word, or whose cause was said before its last step was seen.
                end = min(max(before, mark or before), first)
                if end > before:
                    yield TimePart(kind, before - began, end - began)
                before = end
        resumed = made[place + 1].resumed if place + 1 < len(made) else attempt.steps[-1].step
        kept = [step.at for step in attempt.steps if step.step <= resumed]
        until = kept[-1] if kept else first
        for kind, start, end in (("kept", first, until), ("lost", until, last)):
            if end > start:
                yield TimePart(kind, start - began, end - began)
        before = last


def chaos_svg(
    title: str, lines: Sequence[str], attempts: Sequence[Attempt], faults: Sequence[Recovery]
) -> str:
    """Draw the time in rows. lines: the text below the title."""
    parts_of_time = list(spans(attempts))
    whole = max((span.end for span in parts_of_time), default=0.0)
    seconds = next((size for size in _ROW_SECONDS if size * _MOST_ROWS >= whole), whole / _MOST_ROWS)
    parts = [_text(16, 28, title, "bold")]
    y = 30.0
    for line in lines:
        y += _LINE
        parts.append(_text(16, y, line))
    parts += _legend(y + 14)
    scale = _Scale(seconds, y + 66)
    rows = max(1, math.ceil(whole / seconds))
    parts += [part for row in range(rows) for part in _ticks(scale, row)]
    parts += [part for span in parts_of_time for part in _boxes(span, scale)]
    parts += [_mark(fault, scale) for fault in faults if fault.at <= whole]
    height = scale.y(rows) + 4
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH:g} {height:g}' role='img' "
        "aria-labelledby='chaos-title chaos-text'>",
        f"<title id='chaos-title'>{escape(title)}</title>",
        f"<desc id='chaos-text'>{escape(' '.join(lines))}</desc>",
        f"<style>{_STYLE}</style>",
        "<rect width='100%' height='100%' class='paper'/>",
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _boxes(span: TimePart, scale: _Scale) -> Iterator[str]:
    """Yield the box of a span in each row that it is in."""
    start = span.start
    while start < span.end:
        row, x = scale.place(start)
        end = min(span.end, (row + 1) * scale.seconds)
        if end <= start:
            return
        width = (end - start) / scale.seconds * (_RIGHT - _LEFT)
        said = f"{_WORDS[span.kind]}: {span.end - span.start:.1f} s from {span.start:.1f} s on"
        yield (
            f"<rect x='{x:.2f}' y='{scale.y(row):g}' width='{width:.2f}' height='{_BAND}' class='{span.kind}'>"
            f"<title>{escape(said)}</title></rect>"
        )
        start = end


def _mark(fault: Recovery, scale: _Scale) -> str:
    row, x = scale.place(fault.at)
    y = scale.y(row)
    said = f"{fault.at:.1f} s: {fault.kind}, rank {fault.rank}: {fault.outcome} {fault.detail}".strip()
    line = f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{y - 6:g}' y2='{y + _BAND:g}' class='fault'/>"
    return f"<g><title>{escape(said)}</title>{line}{_text(x, y - 9, fault.kind, anchor='middle')}</g>"


def _legend(y: float) -> Iterator[str]:
    for place, (kind, word) in enumerate(_WORDS.items()):
        x = 16 + place * (_WIDTH - 32) / len(_WORDS)
        yield f"<rect x='{x:g}' y='{y:g}' width='12' height='12' class='{kind}'/>"
        yield _text(x + 18, y + 10, word)


def _ticks(scale: _Scale, row: int) -> Iterator[str]:
    y = scale.y(row)
    yield _text(16, y + 15, _clock(row * scale.seconds), "pale")
    for tick in range(_TICKS + 1):
        x = _LEFT + tick * (_RIGHT - _LEFT) / _TICKS
        yield f"<line x1='{x:.2f}' x2='{x:.2f}' y1='{y:g}' y2='{y + _BAND + 4:g}' class='tick'/>"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f" class='{kind}'" if kind else ""
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}'{named}>{escape(text)}</text>"
