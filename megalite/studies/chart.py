"""Charts as SVG: panels in a grid, with linear, logarithmic or named axes, for a light and a dark page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from xml.sax.saxutils import escape

from megalite.errors import counted

WIDTH = 960
_LEFT, _TOP, _BOTTOM, _RIGHT = 58, 30, 44, 14
_TICKS = 5
_STYLE = """
svg { color-scheme: light dark; font-family: 'DejaVu Sans', Verdana, sans-serif; font-size: 11px; }
.paper { fill: #ffffff; } text { fill: #1f2328; } .pale { fill: #59636e; } .bold { font-weight: bold; }
.grid { stroke: #d8dee4; } .s0 { --c: #1f6fc4; } .s1 { --c: #c4591f; } .s2 { --c: #2c8a3d; } .s3 { --c: #8a4fc0; }
.s4 { --c: #a8831a; } .s5 { --c: #c02f6b; } .s6 { --c: #208a8a; } .s7 { --c: #6b7280; }
polyline { fill: none; stroke: var(--c); stroke-width: 1.5; } circle, path { fill: var(--c); } .key { fill: var(--c); }
.dashed { stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; } text { fill: #e6edf3; } .pale { fill: #9198a1; } .grid { stroke: #30363d; }
.s0 { --c: #6cb0ff; } .s1 { --c: #ff9b66; } .s2 { --c: #6fd080; } .s3 { --c: #c79bff; } .s4 { --c: #e0bd5a; }
.s5 { --c: #ff7fae; } .s6 { --c: #5fd0d0; } .s7 { --c: #a0a8b4; }
}
"""
_COLOURS = 8


@dataclass(frozen=True)
class ChartSeries:
    """Points (x, y) of one colour. shape: "line", "dashed", "dots", or "star" for what was held out."""

    points: Sequence[tuple[float, float]]
    shape: str = "dots"
    label: str = ""
    colour: int = 0
    titles: Sequence[str] = ()
    """A text for each point, which a browser shows."""


@dataclass(frozen=True)
class ChartAxis:
    """An axis. log: logarithmic. names: for x from 0 on, in place of numbers."""

    title: str
    log: bool = False
    names: Sequence[str] = ()

    def at(self, value: float) -> float:
        return math.log10(value) if self.log else value


@dataclass(frozen=True)
class ChartPanel:
    """A chart: its title, axes and series. y_span: limits of y, which points may exceed."""

    title: str
    x: ChartAxis
    y: ChartAxis
    series: Sequence[ChartSeries] = field(default_factory=tuple)
    y_span: tuple[float, float] | None = None


def chart_svg(
    title: str, lines: Sequence[str], panels: Sequence[ChartPanel], columns: int, height: int = 230
) -> str:
    """Return the picture. lines: the text below the title. height: pixels of a row of panels."""
    parts = [_text(12, 24, title, "bold")]
    y = 24
    for line in lines:
        y += 17
        parts.append(_text(12, y, line, "pale"))
    y += 14
    width = WIDTH / columns
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f"<g transform='translate({column * width:.1f} {y + row * height})'>")
        parts += [*_panel(panel, width, height), "</g>"]
    full = y + height * math.ceil(len(panels) / columns) + 8
    said = f"{' '.join(lines)} {counted(len(panels), 'chart')}: {'; '.join(panel.title for panel in panels)}"
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {full}' width='100%' role='img' "
        "aria-labelledby='chart-title chart-text'>",
        f"<title id='chart-title'>{escape(title)}</title>",
        f"<desc id='chart-text'>{escape(said)}</desc>",
        f"<style>{_STYLE}</style>",
        "<rect width='100%' height='100%' class='paper'/>",
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _panel(panel: ChartPanel, width: float, height: float) -> Iterator[str]:
    points = [point for series in panel.series for point in series.points]
    yield _text(_LEFT, 18, panel.title, "bold")
    if not points:
        yield _text(_LEFT, height / 2, "no finished run", "pale")
        return
    left, right = _span([panel.x.at(x) for x, _ in points])
    low, high = panel.y_span or (min(y for _, y in points), max(y for _, y in points))
    low, high = _span([panel.y.at(low), panel.y.at(high)])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (panel.x.at(x) - left) / (right - left)
        up = min(1.0, max(0.0, (panel.y.at(y) - low) / (high - low)))
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    for value, name in _ticks(panel.x, left, right):
        x, bottom = place(value, 10**low if panel.y.log else low)
        yield f"<line class='grid' x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{bottom:.1f}'/>"
        yield _text(x, bottom + 14, name, "pale", "middle")
    for value, name in _ticks(panel.y, low, high):
        start, y = place(10**left if panel.x.log else left, value)
        yield f"<line class='grid' x1='{start:.1f}' x2='{width - _RIGHT:.1f}' y1='{y:.1f}' y2='{y:.1f}'/>"
        yield _text(start - 6, y + 4, name, "pale", "end")
    yield _text((width + _LEFT) / 2, height - 10, panel.x.title, "pale", "middle")
    for series in panel.series:
        # A line ends at the frame; a dot that is higher stands at its edge, where its title says how high it is.
        if series.shape in ("line", "dashed"):
            for inside, part in groupby(series.points, lambda point: low <= panel.y.at(point[1]) <= high):
                if inside:
                    yield _line(series, [place(x, y) for x, y in part])
        else:
            yield from _marks(series, [place(x, y) for x, y in series.points])
    labelled = [series for series in panel.series if series.label]
    for number, series in enumerate(labelled):
        y = _TOP + 12 + 13 * number
        yield (
            f"<text class='key s{series.colour % _COLOURS}' x='{width - _RIGHT - 4:.1f}' y='{y}' text-anchor='end'>"
            + (f"{escape(series.label)}</text>")
        )


def _line(series: ChartSeries, places: Sequence[tuple[float, float]]) -> str:
    kind = f"s{series.colour % _COLOURS}" + " dashed" * (series.shape == "dashed")
    return f"<polyline class='{kind}' points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in places)}'/>"


def _marks(series: ChartSeries, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    colour = f"s{series.colour % _COLOURS}"
    for number, (x, y) in enumerate(places):
        said = f"<title>{escape(series.titles[number])}</title>" if series.titles else ""
        if series.shape == "star":
            path = f"M{x:.1f} {y - 7:.1f}l2 5h5l-4 3 2 6-5-4-5 4 2-6-4-3h5z"
            yield f"<path class='{colour}' d='{path}'>{said}</path>"
        else:
            yield f"<circle class='{colour}' cx='{x:.1f}' cy='{y:.1f}' r='3.5'>{said}</circle>"


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis with a margin, of a positive length."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or max(0.5 * abs(low), 0.5)
    return low - margin, high + margin


def _ticks(axis: ChartAxis, low: float, high: float) -> Iterator[tuple[float, str]]:
    """Yield value and text of the ticks between two places of an axis."""
    if axis.names:
        yield from ((float(place), name) for place, name in enumerate(axis.names))
        return
    if axis.log and high - low > 0.7:
        steps = (1.0,) if high - low > 2.5 else (1.0, 3.0)
        for power in range(math.floor(low), math.ceil(high) + 1):
            for step in steps:
                if low <= math.log10(step * 10.0**power) <= high:
                    yield step * 10.0**power, short_number(step * 10.0**power)
        return
    first, last = (10**low, 10**high) if axis.log else (low, high)
    size = 10.0 ** math.floor(math.log10((last - first) / _TICKS))
    size = next(size * factor for factor in (1, 2, 5, 10) if (last - first) / (size * factor) <= _TICKS)
    for number in range(math.ceil(first / size), math.floor(last / size) + 1):
        yield number * size, short_number(number * size)


def short_number(value: float) -> str:
    """Return a number in few letters: 300k, 1.5M, 1e-05."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and abs(value) < 1e15:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f"<text class='{kind}' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"
