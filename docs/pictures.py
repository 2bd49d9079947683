"""The pictures of docs/, drawn from the code's own tables.

    python -m docs.pictures        # writes docs/layout.svg and docs/schedules.svg

Each has a light background of its own, so that it can be read on a dark page too.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from megalite.topology.axes import Layout
from megalite.topology.schedule_timeline import Costs, Timeline, ideal_timeline
from megalite.topology.schedules import Action

FOLDER = Path(__file__).parent
LAYOUT = Layout(pipeline=2, data=2, tensor=2)
STAGES, MICRO_BATCHES = 4, 8
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
"""Name of a schedule -> chunks of each stage."""
COLORS = {"F": "#9ecbff", "B": "#b4e2a8", "I": "#b4e2a8", "W": "#ffd59a"}
TEXT, PALE, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#ffffff"


def pictures() -> dict[str, str]:
    """Return file name -> SVG."""
    return {"layout.svg": layout_picture(), "schedules.svg": schedules_picture()}


def layout_picture(layout: Layout = LAYOUT) -> str:
    """Draw stages as columns, replicas as rows, and the tensor-parallel ranks of each beside one another."""
    box, gap, left, top = 92, 36, 110, 84
    cell = layout.tensor * box + 20
    width = left + layout.pipeline * (cell + gap)
    height = top + layout.data * (96 + gap) + 32
    parts = [_text(left, 26, f"{layout.world_size} ranks: {_product(layout)}", size=16, bold=True)]
    for stage in range(layout.pipeline):
        x = left + stage * (cell + gap)
        parts.append(_text(x + cell / 2, 66, f"stage {stage}", anchor="middle"))
    for replica in range(layout.data):
        y = top + replica * (96 + gap)
        parts.append(_text(left - 12, y + 44, f"replica {replica}", anchor="end"))
        parts.append(_text(left - 12, y + 62, "own samples", anchor="end", size=11, color=PALE))
        for stage in range(layout.pipeline):
            x = left + stage * (cell + gap)
            if stage:
                parts += _arrow(x - gap + 4, y + 48, x - 6)
            parts.append(_rectangle(x, y, cell, 96, "#eef1f4"))
            parts.append(
                _text(x + cell / 2, y + 88, "layers of the stage", anchor="middle", size=11, color=PALE)
            )
            members = [r for r in range(layout.world_size) if _place(layout, r) == (stage, replica)]
            for tensor, rank in enumerate(members):
                parts.append(_rectangle(x + 10 + tensor * box, y + 10, box - 6, 62, COLORS["F"]))
                middle = x + 10 + tensor * box + (box - 6) / 2
                parts.append(_text(middle, y + 36, f"rank {rank}", anchor="middle", bold=True))
                parts.append(_text(middle, y + 56, f"tensor {tensor}", anchor="middle", size=11))
    notes = (
        f"Tensor: {layout.tensor} ranks share each layer of a stage. Pipeline: stages hand on hidden states.",
        "Data: replicas train on their own samples and average their gradients.",
    )
    for line, text in enumerate(notes):
        parts.append(_text(12, height - 28 + 18 * line, text, size=11, color=PALE))
    groups = "; ".join(
        f"{name} groups {', '.join('-'.join(map(str, group)) for group in layout.groups(axis))}"
        for name, axis in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"))
    )
    return _picture("layout", width, height, f"A layout of {layout.world_size} ranks", groups, parts)


def schedules_picture() -> str:
    """Draw the ideal timeline of each schedule: one line a stage, one box a forward or backward of a micro batch."""
    unit, row, left = 22, 24, 78
    timelines = {
        name: ideal_timeline(
            name,
            STAGES,
            MICRO_BATCHES,
            chunks,
            Costs(chunks=(1 / chunks,) * (STAGES * chunks)),
        )
        for name, chunks in SCHEDULES.items()
    }
    width = left + unit * max(timeline.length for timeline in timelines.values()) + 20
    parts, y = [], 14.0
    for name, timeline in timelines.items():
        title = f"{name}: {100 * timeline.bubble:.1f} % idle"
        if SCHEDULES[name] > 1:
            title += f", {SCHEDULES[name]} chunks a stage (the second has an outline)"
        parts.append(_text(left, y + 14, title, bold=True))
        parts += _rows(timeline, left, y + 24, unit, row)
        y += 24 + STAGES * row + 16
    labels = {"F": "forward", "B": "backward", "W": "gradients of the weights (zbv splits the backward)"}
    x = float(left)
    for kind, label in labels.items():
        parts.append(_rectangle(x, y, 16, 16, COLORS[kind]))
        parts.append(_text(x + 22, y + 13, label, size=12))
        x += 22 + 8 * len(label) + 24
    said = "; ".join(f"{name}: {100 * each.bubble:.1f} % idle" for name, each in timelines.items())
    title = f"Three schedules of {STAGES} stages and {MICRO_BATCHES} micro batches"
    return _picture("schedules", width, y + 32, title, said, parts)


def _rows(timeline: Timeline, left: float, top: float, unit: float, row: float) -> Iterator[str]:
    length = timeline.length * unit
    for stage in range(timeline.stages):
        y = top + stage * row
        yield _text(left - 10, y + 15, f"stage {stage}", anchor="end", size=12)
        yield _rectangle(left, y, length, row - 4, "#f6f8fa")
    for (stage, action), start in timeline.starts.items():
        x, y, width = left + start * unit, top + stage * row, timeline.costs.of(action) * unit
        second = _is_second(action, timeline.stages)
        yield _rectangle(x, y, width, row - 4, COLORS[action.kind], outline=TEXT if second else LINE)
        yield _text(x + width / 2, y + 14, str(action.micro_batch + 1), anchor="middle", size=10)


def _is_second(action: Action, stages: int) -> bool:
    return action.chunk >= stages


def _place(layout: Layout, rank: int) -> tuple[int, int]:
    place = layout.coordinates(rank)
    return place.pp, place.dp


def _product(layout: Layout) -> str:
    return f"pipeline {layout.pipeline} x data {layout.data} x tensor {layout.tensor}"


def _picture(name: str, width: float, height: float, title: str, description: str, parts: list[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' "
        f"height='{height:g}' font-family='DejaVu Sans, Verdana, sans-serif' role='img' "
        f"aria-labelledby='{name}-title {name}-text'>"
    )
    lines = [
        head,
        f"<title id='{name}-title'>{escape(title)}</title>",
        f"<desc id='{name}-text'>{escape(description)}</desc>",
        f"<rect width='{width:g}' height='{height:g}' rx='8' fill='{PAPER}'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 13,
    bold: bool = False,
    color: str = TEXT,
) -> str:
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{color}' text-anchor='{anchor}'{weight}>"
        f"{escape(text)}</text>"
    )


def _rectangle(x: float, y: float, width: float, height: float, fill: str, outline: str = LINE) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='3' fill='{fill}' stroke='{outline}'/>"


def _arrow(x: float, y: float, end: float) -> list[str]:
    return [
        f"<path d='M {x:g} {y:g} H {end:g} m -7 -5 l 7 5 l -7 5' fill='none' stroke='{TEXT}' stroke-width='1.5'/>"
    ]


if __name__ == "__main__":
    for file, picture in pictures().items():
        (FOLDER / file).write_text(picture, encoding="utf-8")
