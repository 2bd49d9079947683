"""The table as a file, how it is made, and the part of it that every change runs."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.support.matrix.axes import AXES, Row
from tests.support.matrix.pairwise import Covering, cover
from tests.support.matrix.rows import illegal, settings_of

TABLE = Path(__file__).parents[2] / "parity" / "matrix.csv"
# Where mistakes of one feature show in another: each pair of their values stands in the part that every change runs.
CROSSED = ("layout kind", "schedule", "zero", "precision", "sequence")


def made_anew() -> Covering:
    """The table from the axes and the rules; takes seconds."""
    axes = {name: list(axis.values) for name, axis in AXES.items()}
    return cover(axes, illegal, lambda row: 4 + ranks_of(row))


def ranks_of(row: Row) -> int:
    settings = settings_of(row)
    return settings["parallel.tensor"] * settings["parallel.pipeline"] * settings["parallel.data"]


def read_table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file, skipinitialspace=True)]


def as_text(rows: Sequence[Row]) -> str:
    """A line a row, the columns one below the other."""
    lines = [list(AXES), *([row[axis] for axis in AXES] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        ", ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n"
        for line in lines
    )


def part_for_every_change(rows: Sequence[Row]) -> list[int]:
    """Few rows in which each value of each axis meets each schedule, and all of CROSSED one another.

    As far as the table has them.
    """
    return _few(rows, {index: set(_meetings(row)) for index, row in enumerate(rows)})


def part_for_the_core(rows: Sequence[Row], part: Iterable[int]) -> list[int]:
    """Few rows of `part` that have each value of each axis, and each kind of layout."""
    return _few(rows, {index: {*rows[index].items(), ("kind", layout_kind(rows[index]))} for index in part})


def _few(rows: Sequence[Row], wanted: dict[int, set[Any]]) -> list[int]:
    """Greedy: again and again the row that has the most that is new for what it costs."""
    missing = set().union(*wanted.values())
    chosen: list[int] = []
    while missing:
        best = max(wanted, key=lambda index: len(wanted[index] & missing) / _cost(rows[index]))
        missing -= wanted.pop(best)
        chosen.append(best)
    return sorted(chosen)


def _cost(row: Row) -> int:
    """Of a row, in about tenths of a second: a call, each rank, what torch.compile takes to compile."""
    return 4 + ranks_of(row) + 80 * (row["compile"] == "on")


def _meetings(row: Row) -> Iterator[tuple[str, ...]]:
    kind = layout_kind(row)
    values = {axis: value for axis, value in row.items() if axis != "layout"} | {"layout kind": kind}
    for axis, value in values.items():
        yield ("schedule", row["schedule"], axis, value)
    for one, other in combinations(CROSSED, 2):
        yield (one, values[one], other, values[other])


def layout_kind(row: Row) -> str:
    """Which axes of the mesh have more than one rank."""
    sizes = {axis: settings_of(row)[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "data")}
    return "+".join(axis for axis, size in sizes.items() if size > 1) or "one process"
