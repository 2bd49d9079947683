"""Report of a benchmark's figures: with the machine's facts, as a table and as a dated file."""

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megalite.launcher.process import available_cores

FILE_WIDTH = 160
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, processor, cores, versions, and how busy the machine is at this moment."""
    import torch

    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": available_cores(),
        "torch": torch.__version__,
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def parser_of(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def arguments(description: str | None) -> argparse.Namespace:
    """Those of every benchmark."""
    return arguments_of(parser_of(description))


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parser's own, --quick, and where the figures go; quick ones are kept only where --results says so."""
    parser.add_argument("--quick", action="store_true", help="few cases, short: does it work")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    parsed = parser.parse_args()
    if parsed.results is None and not parsed.quick:
        parsed.results = RESULTS
    return parsed


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """A table of the rows; columns: key -> heading. Figures stand to the right."""
    table = Table(title=title, title_justify="left")
    for key, heading in columns.items():
        table.add_column(heading, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*("" if row[key] is None else str(row[key]) for key in columns))
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def write(
    name: str, facts: Mapping[str, Any], settings: Mapping[str, Any], rows: Sequence[Any], folder: Path | None
) -> None:
    """The figures as <folder>/<date>-<name>-cpu.json."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{facts['date']}-{name}-cpu.json"
    path.write_text(json.dumps({**facts, **settings, "rows": list(rows)}, indent=2) + "\n")
    print(f"written to {path}")
