"""megalite train: train a model, starting its own ranks or as one rank of a launcher."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.arguments import EVERYTHING, Parser, meant, options_and_settings
from megalite.cli.results import error_of, wanted
from megalite.config.first_run import Starter
from megalite.config.flags import COMMAND_LINE
from megalite.config.load import load_run
from megalite.config.sections.describe import describe_keys, section_models
from megalite.errors import ConfigError, Problem
from megalite.launcher.rank.detect import RankInfo, rank_info
from megalite.launcher.rank.environment import meets_others, watched_by_launcher
from megalite.train.meet_ranks import tell_others
from megalite.train.run import Trainer

_HELP = """\
usage: megalite train [RUN.toml] [--section.key value ...]

Train a model on this machine, or as one rank of a launcher such as torchrun.
Without RUN.toml, a text alone trains a small model in minutes.

  megalite train --data.source book.txt
  megalite train run.toml --training.steps 500 --run.folder runs/longer

common settings, as flags or as key = value below [section] in RUN.toml:
  --run.folder FOLDER          folder for everything the run writes
  --data.source TEXT           text file, folder, .jsonl, .parquet or "stdlib"
  --model.preset NAME          shape of the model (megalite config presets)
  --training.steps N           number of optimizer steps
  --training.micro_batch_size N, --training.global_batch_size N
                               sequences per forward, sequences per step
  --optimizer.learning_rate X  peak learning rate
  --parallel.tensor N, --parallel.pipeline N, --parallel.data N
                               ranks of the layout (and --parallel.context N)
  --checkpoint.resume PATH     "auto" (latest checkpoint), "never" or a path
  --SECTION.KEY unset          the default instead of the value in RUN.toml

all settings: megalite train --help SECTION, or --help all; SECTION is one of
"""


def run(arguments: Sequence[str]) -> int:
    """Check the configuration, start the ranks or act as one, train; return the job's exit code."""
    topic = _help_topic(arguments)
    if topic is not None:
        print(_help(topic))
        return 0
    own, overrides = options_and_settings(arguments)
    options = command_parser().parse_args(own)
    info = rank_info()
    leads = info is None or info.rank == 0
    try:
        starter = _starter(overrides, info) if options.run_file is None else None
        loaded = load_run(options.run_file, overrides, info, places=leads, starter=starter)
        if leads:
            for note in loaded.notes:
                print(f"note: {note}")
        trainer = Trainer(loaded.config, origins=loaded.origins)
        code = _train(trainer, str(options.run_file or COMMAND_LINE))
        if leads and wanted():
            # Imported here: it reads the records of a run, which a wrong run file has no use for.
            from megalite.cli.run_status import report_run

            report_run(Path(loaded.config.run.folder), loaded.notes, code)
        return code
    except ConfigError as error:
        if info is None or not meets_others(info):
            raise
        # `megalite launch` shows what its ranks tell.
        shown = leads and not watched_by_launcher()
        if shown:
            print(f"error: {error}", file=sys.stderr, flush=True)
            error_of(error)
        # Other ranks may have read other settings, and wait for this one.
        if not tell_others(info, error) and not shown and info.local_rank == 0:
            raise
        return error.exit_code


def command_parser() -> Parser:
    parser = Parser(prog="megalite train", add_help=False, run_settings=True)
    parser.add_argument("run_file", type=Path, nargs="?", metavar="RUN.toml")
    return parser


def _train(trainer: Trainer, source: str) -> int:
    """Train; return the exit code, 0 for every orderly end of a rank of `megalite launch`.

    `megalite launch` has each rank's code; mpirun and torchrun end the other ranks when one exits with another code.
    """
    try:
        code = trainer.run(source)
    except KeyboardInterrupt:
        if not watched_by_launcher():
            raise
        return 0
    return 0 if watched_by_launcher() else code


def _starter(overrides: Sequence[str], info: RankInfo | None) -> Starter:
    """Return the starter of a run without RUN.toml. Raises ConfigError where machines could fit different ones."""
    if info is not None and not info.on_one_node:
        problem = Problem("RUN.toml", "is required on several machines", "write one with megalite init")
        raise ConfigError([problem], COMMAND_LINE)
    # Imported here: a run with RUN.toml does not read its text before it is prepared.
    from megalite.cli.first_run import starter_of

    return starter_of(overrides)


def _help_topic(arguments: Sequence[str]) -> str | None:
    """Return the word behind --help, "" without one; None if help is not asked for."""
    for place, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            following = arguments[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("-") else ""
    return None


def _help(topic: str) -> str:
    """Return the short help, or the settings of a section or of all. Raises ConfigError for an unknown section."""
    sections = list(section_models())
    if not topic:
        half = sections.index("tokenizer")
        return f"{_HELP}  {' '.join(sections[:half])}\n  {' '.join(sections[half:])}"
    if topic == EVERYTHING:
        return describe_keys()
    # A setting is in the help of its section: --help training.steps.
    section = topic.removeprefix("--").split(".")[0]
    if section not in sections:
        problem = Problem(f"--help {topic}", "is not a section", meant(section, [*sections, EVERYTHING]))
        raise ConfigError([problem], COMMAND_LINE)
    return describe_keys(sections=[section])
