"""The table: generation, its file, and the part that every change runs."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.support.matrix.axes import AXES, LATER, Row
from tests.support.matrix.pairwise import Covering, cover
from tests.support.matrix.rows import illegal, ranks_of, settings_of

TABLE = Path(__file__).parents[2] / "parity" / "matrix.csv"
# Axes whose features interact: the part that every change runs has each pair of their values.
CROSSED = ("layout kind", "schedule", "zero", "precision", "sequence")


def made_anew() -> Covering:
    """Generate the table from the axes and the rules; takes seconds."""
    axes = {name: list(axis.values) for name, axis in AXES.items()}
    return cover(axes, illegal, lambda row: 4 + ranks_of(settings_of(row)), later=LATER)


def read_table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file, skipinitialspace=True)]


def as_text(rows: Sequence[Row]) -> str:
    """Return the table as text: one line per row, with aligned columns."""
    lines = [list(AXES), *([row[axis] for axis in AXES] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        ", ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n"
        for line in lines
    )


def part_for_every_change(rows: Sequence[Row]) -> list[int]:
    """Return few rows with each pair of an axis value and a schedule, and each pair of CROSSED, that the table has."""
    return _few(rows, {index: set(_meetings(row)) for index, row in enumerate(rows)})


def part_for_the_core(rows: Sequence[Row], part: Iterable[int]) -> list[int]:
    """Return few rows of `part` with each value of each axis and each kind of layout."""
    return _few(rows, {index: {*rows[index].items(), ("kind", layout_kind(rows[index]))} for index in part})


def _few(rows: Sequence[Row], wanted: dict[int, set[Any]]) -> list[int]:
    """Choose rows greedily: repeatedly the row with the most new items per cost."""
    missing = set().union(*wanted.values())
    chosen: list[int] = []
    while missing:
        best = max(wanted, key=lambda index: len(wanted[index] & missing) / _cost(rows[index]))
        missing -= wanted.pop(best)
        chosen.append(best)
    return sorted(chosen)


def _cost(row: Row) -> int:
    """Return the cost of a row, roughly in tenths of a second: a call, each rank, and compilation."""
    return 4 + ranks_of(settings_of(row)) + 80 * (row["compile"] == "on")


def _meetings(row: Row) -> Iterator[tuple[str, ...]]:
    kind = layout_kind(row)
    values = {axis: value for axis, value in row.items() if axis != "layout"} | {"layout kind": kind}
    for axis, value in values.items():
        yield ("schedule", row["schedule"], axis, value)
    for one, other in combinations(CROSSED, 2):
        yield (one, values[one], other, values[other])


def layout_kind(row: Row) -> str:
    """Return the axes of the mesh with more than one rank."""
    sizes = {axis: settings_of(row)[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "data")}
    return "+".join(axis for axis, size in sizes.items() if size > 1) or "one process"
