"""megalite report: one HTML page about a run, or several side by side: curves, settings, memory, alarms."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalite.cli.arguments import Parser, add_value
from megalite.cli.results import report, wanted
from megalite.cli.run_status import RunFolderReader, run_folders
from megalite.cli.timeline import picture_of
from megalite.errors import ConfigError, MegaliteError, Problem, write_remedy
from megalite.planner.traces import read_step, traced_steps
from megalite.report.curves import RunCurves
from megalite.report.page import PageRun, report_data, report_page
from megalite.report.run_facts import run_facts

_FILE = "report.html"


def run(arguments: Sequence[str]) -> int:
    """Run `megalite report RUN... [--output FILE] [--json]`. ConfigError where there is no run."""
    options = command_parser().parse_args(arguments)
    folders = run_folders(options.runs)
    runs = [_reported(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    if wanted():
        report(**report_data(runs))
        if options.output is None:
            return 0
    output = options.output or folders[0] / _FILE
    _write(output, report_page(runs))
    report(page=output)
    print(f"report  {output}")
    return 0


def command_parser() -> Parser:
    parser = Parser(prog="megalite report", description=__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folder, or a folder of run folders; several runs share the page",
    )
    about = f"the page (default: {_FILE} in the first run's folder; none with --json)"
    add_value(parser, "--output", Path, "FILE", about)
    return parser


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the folders' paths, as many as tell them apart."""
    paths = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]


def _reported(folder: Path, name: str) -> PageRun:
    curves = RunCurves()
    reader = RunFolderReader(folder, curves.add)
    state = reader.report(reader.read())
    facts = run_facts(folder, on_device="reserved_bytes" in curves.metrics)
    timeline = ""
    if not curves.steps:
        facts.notes.append("metrics.jsonl has no record that can be read: there are no curves")
    with suppress(OSError):
        if traced_steps(folder):
            try:
                timeline = picture_of(read_step(folder))
            except MegaliteError as error:
                facts.notes.append(f"the timeline cannot be drawn: {' '.join(str(error).split())}")
    return PageRun(name, state, curves, facts, timeline)


def _write(output: Path, page: str) -> None:
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        remedy = write_remedy(error, full="") or "name another file with --output"
        problem = Problem("--output", f"{output} cannot be written ({error.strerror})", remedy)
        raise ConfigError([problem], "the command line") from error
