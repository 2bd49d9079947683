"""The pictures of docs/, drawn from the code's own tables.

    python -m docs.pictures        # writes docs/*.svg and docs/learn/*.svg

Each has a light background of its own, so that it can be read on a dark page too.
"""

from collections.abc import Iterator
from pathlib import Path

from docs.context_picture import context_picture
from docs.drawing import BLUE, GREEN, LINE, ORANGE, PALE, TEXT, arrow, label, picture, rectangle
from docs.lesson_pictures import lesson_pictures
from megalite.topology.axes import Layout
from megalite.topology.schedule_timeline import Costs, Timeline, ideal_timeline
from megalite.topology.schedules import Action

FOLDER = Path(__file__).parent
LAYOUT = Layout(pipeline=2, data=2, tensor=2)
STAGES, MICRO_BATCHES = 4, 8
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
"""Name of a schedule -> chunks of each stage."""
COLORS = {"F": BLUE, "B": GREEN, "I": GREEN, "W": ORANGE}


def pictures() -> dict[str, str]:
    """Return file name -> SVG."""
    return {
        "layout.svg": layout_picture(),
        "schedules.svg": schedules_picture(),
        "context.svg": context_picture(),
        "learn/bubble.svg": bubble_picture(),
        **lesson_pictures(),
    }


def layout_picture(layout: Layout = LAYOUT) -> str:
    """Draw stages as columns, replicas as rows, and the tensor-parallel ranks of each beside one another."""
    box, gap, left, top = 92, 36, 110, 84
    cell = layout.tensor * box + 20
    width = left + layout.pipeline * (cell + gap)
    height = top + layout.data * (96 + gap) + 32
    parts = [label(left, 26, f"{layout.world_size} ranks: {_product(layout)}", size=16, bold=True)]
    for stage in range(layout.pipeline):
        x = left + stage * (cell + gap)
        parts.append(label(x + cell / 2, 66, f"stage {stage}", anchor="middle"))
    for replica in range(layout.data):
        y = top + replica * (96 + gap)
        parts.append(label(left - 12, y + 44, f"replica {replica}", anchor="end"))
        parts.append(label(left - 12, y + 62, "own samples", anchor="end", size=11, color=PALE))
        for stage in range(layout.pipeline):
            x = left + stage * (cell + gap)
            if stage:
                parts += arrow(x - gap + 4, y + 48, x - 6)
            parts.append(rectangle(x, y, cell, 96, "#eef1f4"))
            parts.append(
                label(x + cell / 2, y + 88, "layers of the stage", anchor="middle", size=11, color=PALE)
            )
            members = [r for r in range(layout.world_size) if _place(layout, r) == (stage, replica)]
            for tensor, rank in enumerate(members):
                parts.append(rectangle(x + 10 + tensor * box, y + 10, box - 6, 62, COLORS["F"]))
                middle = x + 10 + tensor * box + (box - 6) / 2
                parts.append(label(middle, y + 36, f"rank {rank}", anchor="middle", bold=True))
                parts.append(label(middle, y + 56, f"tensor {tensor}", anchor="middle", size=11))
    notes = (
        f"Tensor: {layout.tensor} ranks share each layer of a stage. Pipeline: stages hand on hidden states.",
        "Data: replicas train on their own samples and average their gradients.",
    )
    for line, text in enumerate(notes):
        parts.append(label(12, height - 28 + 18 * line, text, size=11, color=PALE))
    groups = "; ".join(
        f"{name} groups {', '.join('-'.join(map(str, group)) for group in layout.groups(axis))}"
        for name, axis in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"))
    )
    return picture("layout", width, height, f"A layout of {layout.world_size} ranks", groups, parts)


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
        parts.append(label(left, y + 14, title, bold=True))
        parts += _rows(timeline, left, y + 24, unit, row)
        y += 24 + STAGES * row + 16
    labels = {"F": "forward", "B": "backward", "W": "gradients of the weights (zbv splits the backward)"}
    parts += _legend(left, y, labels)
    said = "; ".join(f"{name}: {100 * each.bubble:.1f} % idle" for name, each in timelines.items())
    title = f"Three schedules of {STAGES} stages and {MICRO_BATCHES} micro batches"
    return picture("schedules", width, y + 32, title, said, parts)


def bubble_picture() -> str:
    """Draw 1F1B with few micro batches and with many: the idle share falls."""
    unit, row, left = 15, 24, 78
    counts = (STAGES, 3 * STAGES)
    timelines = {count: ideal_timeline("1f1b", STAGES, count) for count in counts}
    parts, y = [], 14.0
    for count, timeline in timelines.items():
        title = f"1f1b, {STAGES} stages, {count} micro batches: {100 * timeline.bubble:.1f} % idle"
        parts.append(label(left, y + 14, title, bold=True))
        parts += _rows(timeline, left, y + 24, unit, row)
        y += 24 + STAGES * row + 16
    parts += _legend(left, y, {"F": "forward", "B": "backward"})
    said = "; ".join(
        f"{count} micro batches: {100 * each.bubble:.1f} % idle" for count, each in timelines.items()
    )
    width = left + unit * max(timeline.length for timeline in timelines.values()) + 20
    return picture("bubble", width, y + 32, "The bubble of a pipeline", said, parts)


def _rows(timeline: Timeline, left: float, top: float, unit: float, row: float) -> Iterator[str]:
    length = timeline.length * unit
    for stage in range(timeline.stages):
        y = top + stage * row
        yield label(left - 10, y + 15, f"stage {stage}", anchor="end", size=12)
        yield rectangle(left, y, length, row - 4, "#f6f8fa")
    for (stage, action), start in timeline.starts.items():
        x, y, width = left + start * unit, top + stage * row, timeline.costs.of(action) * unit
        second = _is_second(action, timeline.stages)
        yield rectangle(x, y, width, row - 4, COLORS[action.kind], outline=TEXT if second else LINE)
        yield label(x + width / 2, y + 14, str(action.micro_batch + 1), anchor="middle", size=10)


def _legend(x: float, y: float, labels: dict[str, str]) -> Iterator[str]:
    for kind, meaning in labels.items():
        yield rectangle(x, y, 16, 16, COLORS[kind])
        yield label(x + 22, y + 13, meaning, size=12)
        x += 22 + 8 * len(meaning) + 24


def _is_second(action: Action, stages: int) -> bool:
    return action.chunk >= stages


def _place(layout: Layout, rank: int) -> tuple[int, int]:
    place = layout.coordinates(rank)
    return place.pp, place.dp


def _product(layout: Layout) -> str:
    return f"pipeline {layout.pipeline} x data {layout.data} x tensor {layout.tensor}"


if __name__ == "__main__":
    for file, svg in pictures().items():
        (FOLDER / file).write_text(svg, encoding="utf-8")
