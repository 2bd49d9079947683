"""megalite sweep: train RUN.toml with each combination of some settings, and compare the losses.

Repeat the command to go on: finished runs stay as they are, interrupted ones resume.
"""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.arguments import Parser, add_value, options_and_settings, whole_number
from megalite.cli.examples import shared_folder
from megalite.cli.results import report
from megalite.config.flags import COMMAND_LINE
from megalite.errors import ConfigError, Problem, counted, named
from megalite.launcher.exit_codes import INTERRUPTED, STOPPED
from megalite.launcher.rank.detect import rank_info
from megalite.studies.array_script import array_script
from megalite.studies.outcomes import VALIDATION, RunOutcome, StudyRecord, measure_of, outcomes_csv
from megalite.studies.run_pool import EndedRun, RunPool
from megalite.studies.study_runs import (
    StudyRun,
    StudySource,
    checked_runs,
    share_text,
    study_folder,
    with_text,
)
from megalite.studies.sweep_picture import sweep_svg
from megalite.studies.values import drawn, grid, run_names, swept_settings

_SECTION_FLAGS = (
    "--SECTION.KEY VALUE overrides RUN.toml in every run; the runs are in run.folder with -sweep behind it"
)


def run(arguments: Sequence[str]) -> int:
    """Run `megalite sweep RUN.toml --over KEY=VALUES`. Returns the exit code: 1 where a run failed."""
    parser = command_parser()
    own, flags = options_and_settings(parser.with_long_names(arguments))
    options = parser.parse_args(own)
    refuse_launcher("sweep")
    swept = swept_settings(options.over, draws=options.random is not None)
    combinations = grid(swept) if options.random is None else drawn(swept, options.random, options.draw_seed)
    keys = [setting.key for setting in swept]
    named = dict(zip(run_names(combinations), combinations, strict=True))
    source = StudySource(options.run_file, tuple(flags))
    # The first combination: RUN.toml alone may lack a setting that is swept.
    first = [f"--{key}={value}" for key, value in combinations[0].items()]
    folder = study_folder_of(source, first, "sweep")
    runs = checked_runs(source, folder, named, jobs=options.jobs)
    if options.report and not (folder / "sweep.json").exists():
        problem = Problem("--report", f"there is no {folder / 'sweep.json'}", "sweep without --report first")
        raise ConfigError([problem], COMMAND_LINE)
    runs = with_text(runs, share_text(runs[0].config, folder / "text", keys))
    record = StudyRecord(folder / "sweep.json", runs, measure_of(runs))
    if options.slurm or options.submit:
        return _write_array(options, folder, runs, record)
    stopped = 0
    if not options.report:
        stopped = train_runs(RunPool(options.run_file, jobs=options.jobs, say=_say), runs, record)
    _write_results(folder, keys, runs, record)
    report(folder=folder, keys=keys, **record.document())
    if stopped:
        print("stopped: the same command goes on")
        return stopped
    return 1 if any(outcome.state == "failed" for outcome in record.outcomes.values()) else 0


def refuse_launcher(command: str) -> None:
    """Raise ConfigError in a rank of a launcher, each of which would start all runs."""
    if rank_info() is not None:
        problem = Problem(f"megalite {command}", "starts its runs itself", "call it once, without a launcher")
        raise ConfigError([problem], COMMAND_LINE)


def study_folder_of(source: StudySource, first: Sequence[str], kind: str) -> Path:
    """Return the folder of the study of a source, whose settings are checked with the flags of its first run."""
    try:
        return study_folder(source.config(*first), kind)
    except ConfigError as error:
        # The check of all runs says more, but of the folder, which they do not use.
        if any(problem.key == "run.folder" for problem in error.problems):
            raise
        return Path("runs") / f"default-{kind}"


def train_runs(pool: RunPool, runs: Sequence[StudyRun], record: StudyRecord) -> int:
    """Train the runs that are not finished; return the exit code of a study that a signal stopped, else 0."""
    waiting = [run for run in runs if not record.is_finished(run)]
    if done := len(runs) - len(waiting):
        print(f"{counted(done, 'run')} of {len(runs)} finished already")
    record.write()

    def on_end(ended: EndedRun) -> None:
        _say(f"{ended.run.name}: {ended_text(record.end(ended))} ({ended.seconds:.0f} s)")

    pool.train(waiting, on_end)
    if pool.stopped_by is None:
        return 0
    return INTERRUPTED if pool.stopped_by.name == "SIGINT" else STOPPED


def ended_text(outcome: RunOutcome) -> str:
    """Return how a run ended, in a few words."""
    if outcome.state == "failed":
        return f"failed: {outcome.cause}"
    if outcome.loss is None:
        return outcome.state
    return f"loss {outcome.loss:.4f} after {counted(outcome.steps, 'step')}"


def _write_array(
    options: argparse.Namespace, folder: Path, runs: Sequence[StudyRun], record: StudyRecord
) -> int:
    template = (shared_folder() / "launch" / "slurm.sbatch").read_text(encoding="utf-8")
    waiting = [run for run in runs if not record.is_finished(run)]
    report(folder=folder, waiting=[run.name for run in waiting])
    if not waiting:
        print(f"{counted(len(runs), 'run')} finished already: there is nothing to submit")
        return 0
    record.write()
    jobs = options.jobs if options.jobs > 1 else None
    script = folder / "array.sbatch"
    script.write_text(array_script(template, options.run_file, waiting, jobs), encoding="utf-8")
    report(script=script)
    print(f"{script}: an array of {counted(len(waiting), 'run')}")
    if not options.submit:
        print(
            f"next: sbatch {script}, and when it has ended the same command with --report in place of --slurm"
        )
        return 0
    if shutil.which("sbatch") is None:
        problem = Problem("--submit", "there is no sbatch on PATH", f"call sbatch {script} on a login node")
        raise ConfigError([problem], COMMAND_LINE)
    return subprocess.run(["sbatch", str(script)], check=False).returncode


def _write_results(folder: Path, keys: Sequence[str], runs: Sequence[StudyRun], record: StudyRecord) -> None:
    outcomes = record.by_loss()
    record.write({"keys": list(keys)})
    title = f"sweep of {', '.join(keys)}: {counted(len(runs), 'run')}"
    picture = sweep_svg(title, record.measure, keys, outcomes, runs)
    with named(folder):
        (folder / "sweep.csv").write_text(outcomes_csv(outcomes, keys), encoding="utf-8")
        (folder / "sweep.svg").write_text(picture, encoding="utf-8")
    print(f"by {record.measure}")
    for line in table_lines(outcomes, keys):
        print(line)
    if record.measure != VALIDATION:
        print("note: a training loss is no measure of new text; set data.split or data.validation")
    for name in ("sweep.json", "sweep.csv", "sweep.svg"):
        print(f"  {folder / name}")


def table_lines(outcomes: Sequence[RunOutcome], keys: Sequence[str]) -> list[str]:
    """Return the table of a sweep, with the text of a failed run behind its line."""
    rows = [[*(key.split(".")[-1] for key in keys), "loss", "steps", "state"]]
    for outcome in outcomes:
        loss = "-" if outcome.loss is None else f"{outcome.loss:.4f}"
        values = [outcome.values[key] for key in keys]
        rows.append([*values, loss, f"{outcome.steps:,}", f"{outcome.state} {outcome.cause}".strip()])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _say(text: str) -> None:
    print(text, flush=True)


def command_parser() -> Parser:
    usage = "megalite sweep RUN.toml --over KEY=VALUES [options]"
    parser = Parser(
        prog="megalite sweep",
        usage=usage,
        description=__doc__,
        epilog=_SECTION_FLAGS,
        short={"--seed": "--draw-seed"},
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run whose settings are swept")
    about = "values of a setting: KEY=1e-4,3e-4, or KEY=log:1e-5:1e-2:4 (lin too); may be repeated"
    parser.add_argument("--over", action="append", required=True, metavar="KEY=VALUES", help=about)
    add_value(
        parser, "--random", whole_number(1), "N", "draw N combinations, also within ranges, not the grid"
    )
    add_value(parser, "--draw-seed", whole_number(0), "S", "seed of the draws, --seed for short", 0)
    add_value(parser, "--jobs", whole_number(1), "N", "runs at once; they share the cores", 1)
    parser.add_argument("--report", action="store_true", help="compare what is there, and train nothing")
    parser.add_argument(
        "--slurm", action="store_true", help="write one SLURM array script, and train nothing"
    )
    parser.add_argument("--submit", action="store_true", help="write that script and call sbatch with it")
    return parser
