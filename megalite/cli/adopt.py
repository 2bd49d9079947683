"""megalite adopt: account for every key of another program's script, configuration or checkpoint; write a run.toml."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.arguments import Parser
from megalite.cli.results import error_of, report, report_error
from megalite.config.load import load_run
from megalite.convert.adopt.report import account_lines, account_report, write_run_file
from megalite.convert.adopt.systems import PROGRAMS, adopt
from megalite.errors import ConfigError, Problem

_WRONG_INPUT = 2


def run(arguments: Sequence[str]) -> int:
    """Run `megalite adopt PATH... [--output run.toml] [--partial] [--all]`.

    Returns 0, or 2 where a refused key would change the numbers or the run file lacks a setting, unless with
    --partial. Raises ConfigError.
    """
    options = command_parser().parse_args(arguments)
    output: Path = options.output
    if output.exists() and not options.overwrite:
        problem = Problem(
            str(output), "exists already", "name another --output, or add --overwrite", {"--overwrite": True}
        )
        raise ConfigError([problem], "megalite adopt")
    account = adopt(options.paths, dict(options.set))
    for line in account_lines(account, every=options.all):
        print(line)
    report(**account_report(account))
    if account.changes_numbers and not options.partial:
        message = "refused keys change the numbers, so no run file is written"
        problem = Problem.reset("--partial", message, "follow the remedies, or add --partial", True)
        print(f"error: {message}; {problem.remedy}", file=sys.stderr)
        report_error((problem,), message, _WRONG_INPUT)
        return _WRONG_INPUT
    report(run_file=output)
    write_run_file(account, output, " ".join(map(str, options.paths)))
    print(f"\n{output} written")
    return _checked(output, partial=options.partial)


def _checked(output: Path, *, partial: bool) -> int:
    """Load the run file as `config show` does; print what has to be set, and what this machine lacks.

    partial: whether a run file with something left to set was asked for.
    """
    try:
        load_run(output)
    except ConfigError as error:
        if partial:
            report(to_set=[problem.as_dict() for problem in error.problems])
            print(f"to be set in {output} before it runs:")
            for problem in error.problems:
                print(f"  {problem}")
            return 0
        print(f"error: {error}", file=sys.stderr)
        error_of(error)
        return _WRONG_INPUT
    try:
        load_run(output, places=True)
    except ConfigError as error:
        for problem in error.problems:
            print(f"note: not on this machine: {problem.key} = {problem.message}")
    return 0


def command_parser() -> Parser:
    parser = Parser(
        prog="megalite adopt",
        usage="megalite adopt PATH ... [OPTION ...]",
        description=__doc__,
        epilog=f"Known programs: {', '.join(PROGRAMS)}. A script is read, never executed.",
    )
    about = "launch script or configuration, with its DeepSpeed JSON and hostfile; or a checkpoint folder"
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=about)
    about = "the run file to write (run.toml)"
    parser.add_argument("--output", type=Path, default=Path("run.toml"), metavar="RUN.toml", help=about)
    parser.add_argument("--overwrite", action="store_true", help="replace the run file if it exists")
    about = "write the run file though a refused key would change the numbers"
    parser.add_argument("--partial", action="store_true", help=about)
    about = "a line for every taken key and every one without effect, which are counted otherwise"
    parser.add_argument("--all", action="store_true", help=about)
    about = "set a variable of a launch script, or its argument 1, 2, ...; may be repeated"
    parser.add_argument("--set", type=_pair, action="append", default=[], metavar="NAME=VALUE", help=about)
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not (name.isidentifier() or name.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
