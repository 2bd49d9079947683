"""megalite top: watch runs from any terminal: loss, speed, time left, checkpoints, alarms."""

import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megalite.cli.arguments import Parser
from megalite.cli.results import report, wanted
from megalite.cli.run_status import RunFolderReader, run_folders
from megalite.launcher.exit_codes import TERMINATED
from megalite.monitor.run_view import RunStatus, ViewLine, printable, seconds_left, styled, view_lines
from megalite.monitor.work import duration

_REFRESH_SECONDS = 0.5


def run(arguments: Sequence[str]) -> int:
    """Run `megalite top [RUN ...] [--once] [--json]`. ConfigError where there is no run."""
    options = command_parser().parse_args(arguments)
    readers = [RunFolderReader(folder) for folder in run_folders(options.runs)]
    if wanted():
        reports = [reader.report(reader.read()) for reader in readers]
        report(**(reports[0] if len(reports) == 1 else {"runs": reports}))
    elif options.once or not _watch(readers):
        width = shutil.get_terminal_size().columns
        for line in _lines(
            readers, width, ascii_only=not (sys.stdout.encoding or "").lower().startswith("utf")
        ):
            print(line.text)
    return 0


def command_parser() -> Parser:
    parser = Parser(prog="megalite top", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        default=[Path("runs")],
        metavar="RUN",
        help="run folder, or a folder of run folders (default: runs); several runs make a table",
    )
    parser.add_argument("--once", action="store_true", help="print the present state and end, as into a pipe")
    return parser


def _watch(readers: Sequence[RunFolderReader]) -> bool:
    """Draw the runs until Ctrl-C; return False at once where stdout is no terminal that can be drawn on."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        return False
    with (
        suppress(KeyboardInterrupt),
        _ends_on_sigterm(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            lines = _lines(readers, console.width, ascii_only=console.options.ascii_only)
            live.update(styled([*lines, ViewLine(""), ViewLine("Ctrl-C leaves", "dim")]), refresh=True)
            time.sleep(_REFRESH_SECONDS)
    for line in _lines(readers, console.width, ascii_only=console.options.ascii_only):
        console.print(styled([line]))
    return True


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Have SIGTERM restore the terminal before the process ends."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lines(readers: Sequence[RunFolderReader], width: int, *, ascii_only: bool) -> list[ViewLine]:
    """Return the view of a run, or the table of several."""
    statuses = [reader.read() for reader in readers]
    if len(readers) == 1:
        return view_lines(readers[0].history, statuses[0], width, ascii_only=ascii_only)
    rows: list[tuple[str, ...]] = [("run", "state", "step", "", "left", "loss", "tokens/s", "")]
    for reader, status in zip(readers, statuses, strict=True):
        rows.append(tuple(printable(text, ascii_only=ascii_only) for text in _row(reader, status)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    styles = ["dim", *("bold red" if status.state == "failed" else "" for status in statuses)]
    return [ViewLine(*line) for line in zip(texts, styles, strict=True)]


def _row(reader: RunFolderReader, status: RunStatus) -> tuple[str, ...]:
    record, total, step = reader.history.last, status.total_steps, reader.history.step or 0
    left = seconds_left(record, total)
    loss, speed = record.get("loss"), record.get("tokens_per_second")
    return (
        status.name,
        status.state,
        f"{step:,}/{total:,}" if total else f"{step:,}",
        f"{step / total:.0%}" if total else "",
        "" if left is None else duration(left),
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        "; ".join(filter(None, [status.detail, *reader.history.alarms, *status.alarms])).partition("\n")[0],
    )
