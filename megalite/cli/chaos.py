"""megalite chaos: disturb a job on purpose, and measure what the faults cost.

The job is started by `megalite train` and restarts itself by launch.restarts. Exit code 0 where it comes to the numbers
of a calm run and every fault was dealt with, 1 where not.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megalite.cli.arguments import Parser, add_value, number_above_zero, options_and_settings, whole_number
from megalite.cli.results import report
from megalite.cli.sweep import refuse_launcher
from megalite.config.flags import COMMAND_LINE
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.config.smaller_layout import smaller_layout
from megalite.errors import ConfigError, Problem, listed, named
from megalite.launcher.exit_codes import INTERRUPTED
from megalite.launcher.local import JobSignals
from megalite.launcher.rank.environment import variables
from megalite.verify.chaos.account import (
    Recovery,
    document,
    goodput_of,
    recovery_of,
    step_seconds,
    summary_lines,
)
from megalite.verify.chaos.disturbed import DisturbedJob, JobCommand, Surroundings
from megalite.verify.chaos.equality import Equality, compare, step_to_compare
from megalite.verify.chaos.faults import KINDS, Fault, FaultPlan
from megalite.verify.chaos.picture import chaos_svg
from megalite.verify.chaos.watch import JobWatch
from megalite.verify.chaos.weights import CALLBACK

_NUMBERED = ("stop", "preempt", "full-disk", "drop-link", "shrink")
# A slow rank has a number and a factor: --slow.
_AT_A_TIME = [kind for kind in KINDS if kind != "slow"]
# Fault that needs a second rank -> why a run of one rank has no use for it.
_ONE_RANK = {
    "stop": "the run has one rank, and no other that could notice the hang",
    "drop-link": "the run has one rank, and so no link",
    "shrink": "the run has one rank, and so no smaller layout",
}
_NOT_FOUND = ("not found", "the run ended first", "stuck")
_COMMON = "run_file --minutes --kill-every --flip-bit --no-calm --output --help"
_SECTION_FLAGS = (
    "--SECTION.KEY VALUE overrides RUN.toml; OUTPUT has both run folders, their logs and chaos.json/.txt/.svg"
)


def run(arguments: Sequence[str]) -> int:
    """Run `megalite chaos RUN.toml`. Raises ConfigError, and RankFailure where the job fails without a fault."""
    parser = command_parser()
    own, flags = options_and_settings(parser.with_long_names(arguments))
    options = parser.parse_args(own)
    refuse_launcher("chaos")
    config = load_run(options.run_file, flags, places=True).config
    plan = _plan(options)
    faults = plan.drawn(config.layout.world_size, options.chaos_seed)
    kinds = {fault.kind for fault in faults}
    if problems := list(_problems(options, config, kinds)):
        raise ConfigError(problems, COMMAND_LINE)
    folder = options.output or Path(f"{config.run.folder}-chaos")
    _require_new(folder)
    if "flip-parameter" in kinds:
        flags = [*flags, f"--training.callbacks={json.dumps([*config.training.callbacks, CALLBACK])}"]
    command = JobCommand(options.run_file, tuple(flags), folder / "disturbed", config.layout.world_size)
    say = partial(print, flush=True)
    say(
        f"{len(faults)} faults in {plan.seconds:g} s, seed {options.chaos_seed}; the job's lines: {command.log}"
    )
    with JobSignals() as signals:
        around = Surroundings(variables(), signals, say, _with_fewer_ranks)
        job = DisturbedJob(command, around, faults, plan.seconds, options.chaos_seed)
        job.check_every = config.monitor.self_check_every
        try:
            job.run()
        except BaseException:
            _write(folder, options, job, None, None)
            raise
        calm = equality = None
        if options.calm and not job.interrupted and any(attempt.steps for attempt in job.watch.attempts):
            say("the calm run: as many steps, without a fault")
            calm, equality = _compared(job, replace(command, folder=folder / "calm"), around, config)
    found = _write(folder, options, job, calm, equality)
    report(**found)
    if job.interrupted or (calm is not None and calm.interrupted):
        return INTERRUPTED
    return 0 if found["passed"] else 1


def _require_new(folder: Path) -> None:
    """Make the folder of the report. Raises ConfigError where that cannot be done, or something is in it."""
    rule, remedy = "is not empty", "name another folder, or remove it"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return
    except OSError as error:
        rule, remedy = f"cannot be made ({error.strerror})", "name another folder"
    raise ConfigError([Problem("--output", f"{folder} {rule}", remedy)], COMMAND_LINE)


def _plan(options: argparse.Namespace) -> FaultPlan:
    numbers = {kind: getattr(options, kind.replace("-", "_")) for kind in _NUMBERED}
    for what in options.flip_bit:
        numbers[f"flip-{what}"] = numbers.get(f"flip-{what}", 0) + 1
    return FaultPlan(60 * options.minutes, options.kill_every, numbers, options.at, options.slow)


def _problems(options: argparse.Namespace, config: RunConfig, kinds: set[str]) -> list[Problem]:
    """Return what keeps the faults from being noticed in this run."""
    problems, ranks = [], config.layout.world_size
    if options.kill_every is not None and not kinds:
        rule = f"no kill every {options.kill_every:g} s comes within --minutes {options.minutes:g}"
        problems.append(Problem("--kill-every", rule, "use a shorter time, or more minutes"))
    elif not kinds:
        remedy = "add --kill-every 60, or another fault"
        problems.append(Problem("--kill-every", "no fault was asked for", remedy, {"--kill-every": 60}))
    if "flip-parameter" in kinds and not config.monitor.self_check_every:
        rule = "is 0: the copies of weights are not compared, so that no flipped bit is found"
        problems.append(Problem.reset("monitor.self_check_every", rule, "use 10", 10))
    if "flip-checkpoint" in kinds and config.checkpoint.every is None:
        rule = "is not set, so that no checkpoint could be damaged before the end"
        problems.append(Problem.reset("checkpoint.every", rule, "use 50", 50))
    if "stop" in kinds and config.monitor.on_hang != "stop":
        rule = f'is "{config.monitor.on_hang}", and a stopped rank would never end the job'
        problems.append(Problem.reset("monitor.on_hang", rule, 'use "stop"', "stop"))
    for kind in [kind for kind in _ONE_RANK if kind in kinds and ranks == 1]:
        option = f"--{kind}" if getattr(options, kind.replace("-", "_")) else "--at"
        problems.append(Problem(option, _ONE_RANK[kind], "use --parallel.data 2", {"parallel.data": 2}))
    for rank, _ in options.slow:
        if rank >= ranks:
            problems.append(Problem("--slow", f"the run has no rank {rank}", f"use 0 to {ranks - 1}"))
    late = [seconds for _, seconds in options.at if seconds >= 60 * options.minutes]
    if late:
        rule = f"{max(late):g} s is not within --minutes {options.minutes:g}"
        problems.append(Problem("--at", rule, "use an earlier time, or more minutes"))
    return problems


def _with_fewer_ranks(command: JobCommand) -> JobCommand:
    """Return the command in the nearest legal layout of at least one rank less. Raises LaunchError without one."""
    smaller = smaller_layout(command.run_file, command.flags, command.ranks, command.ranks - 1)
    flags = (*command.flags, *smaller.flags)
    return replace(command, flags=flags, ranks=smaller.loaded.config.layout.world_size)


def _compared(
    job: DisturbedJob, command: JobCommand, around: Surroundings, config: RunConfig
) -> tuple[DisturbedJob, Equality | None]:
    """Run the calm job as far as the disturbed one came, and compare; None where it was interrupted."""
    disturbed, calm_folder = job.command.folder, command.folder
    # The last attempt may have made no step: all were made before.
    last = max(attempt.steps[-1].step for attempt in job.watch.attempts if attempt.steps)
    step = step_to_compare(disturbed, config.checkpoint.every)
    kept = calm_folder.with_name("calm-checkpoint")

    def has_come_as_far(watch: JobWatch) -> bool:
        newest = watch.newest_checkpoint
        if (
            newest is not None
            and step is not None
            and newest.name.endswith(f"-{step:06}")
            and not kept.exists()
        ):
            # The run may remove it while it goes on.
            shutil.copytree(newest, kept)
        return watch.now.steps[-1].step >= last and (step is None or kept.exists())

    calm = DisturbedJob(command, around, until=has_come_as_far)
    calm.run()
    if calm.interrupted:
        return calm, None
    same = job.command.ranks == command.ranks
    return calm, compare(disturbed, calm_folder, kept if kept.exists() else None, bitwise=same)


def _write(
    folder: Path,
    options: argparse.Namespace,
    job: DisturbedJob,
    calm: DisturbedJob | None,
    equality: Equality | None,
) -> dict[str, object]:
    """Print the report, and write it as text, for programs and as a picture; return the facts."""
    attempts = job.watch.attempts
    goodput = goodput_of(attempts, step_seconds(calm.watch.attempts) if calm is not None else None)
    began = next((attempt.up_from or 0.0 for attempt in attempts if attempt.steps), 0.0)
    recoveries = [recovery_of(fault, attempts, began) for fault in job.injected]
    lines = summary_lines(goodput, recoveries, attempts[0].number_of_ranks)
    lines.append(f"torn or flipped checkpoints loaded: {len(job.torn_loaded)}")
    lines += [f"  {line}" for line in job.torn_loaded]
    if job.left:
        lines.append(f"faults that were not done, because the job ended before: {_times_of(job.left)}")
    lines.append(str(equality) if equality is not None else "not compared with a calm run")
    facts: dict[str, object] = {
        "run_file": options.run_file,
        "seed": options.chaos_seed,
        "goodput": document(goodput),
        "faults": [asdict(recovery) for recovery in recoveries],
        "starts": len(attempts),
        "left": [asdict(fault) for fault in job.left],
        "by_hand": sum(recovery.by_hand for recovery in recoveries),
        "torn_loaded": job.torn_loaded,
        "equality": None if equality is None else asdict(equality),
        "passed": _passed(recoveries, job, equality),
        "output": folder,
    }
    title = f"{options.run_file.name}: {len(recoveries)} faults" + (
        f", goodput {goodput.share:.1%}" if goodput else ""
    )
    with named(folder):
        (folder / "chaos.json").write_text(json.dumps(facts, default=str, indent=1) + "\n", encoding="utf-8")
        (folder / "chaos.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "chaos.svg").write_text(chaos_svg(title, lines[:2], attempts, recoveries), encoding="utf-8")
    print(
        *lines,
        *(f"  {folder / name}" for name in ("chaos.json", "chaos.txt", "chaos.svg")),
        sep="\n",
        flush=True,
    )
    return facts


def _passed(recoveries: Sequence[Recovery], job: DisturbedJob, equality: Equality | None) -> bool:
    """Return whether every fault was done and dealt with, no damaged checkpoint loaded, and no number changed."""
    dealt_with = not job.left and not any(each.outcome.startswith(_NOT_FOUND) for each in recoveries)
    return dealt_with and not job.torn_loaded and (equality is None or not equality.different)


def _times_of(faults: Sequence[Fault]) -> str:
    return listed([f"{fault.kind} at {fault.at:.1f} s" for fault in faults], most=8)


def _pair(
    first: Callable[[str], object], second: Callable[[str], object], sign: str, form: str
) -> Callable[[str], object]:
    """Return an argparse type for two values with a sign between them."""

    def parse(text: str) -> object:
        left, found, right = text.partition(sign)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
        return first(left), second(right)

    return parse


def _kind(text: str) -> str:
    if text not in _AT_A_TIME:
        raise argparse.ArgumentTypeError(f"{text!r} is no fault; use one of {', '.join(_AT_A_TIME)}")
    return text


def _factor(text: str) -> float:
    factor = number_above_zero()(text)
    if factor <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} times slower is not slower; use 2, for half of the time")
    return factor


def command_parser() -> Parser:
    parser = Parser(
        prog="megalite chaos",
        description=__doc__,
        common=_COMMON.split(),
        epilog=_SECTION_FLAGS,
        short={"--seed": "--chaos-seed"},
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run that is disturbed")
    add_value(
        parser,
        "--minutes",
        number_above_zero(),
        "M",
        "time from the first step on; then the job saves and stops",
        5.0,
    )
    add_value(
        parser,
        "--kill-every",
        number_above_zero(),
        "S",
        "kill a rank every S seconds, up to a quarter earlier or later",
    )
    for kind in _NUMBERED:
        add_value(parser, f"--{kind}", whole_number(0), "N", f"so often: {KINDS[kind]}", 0)
    about = "flip a bit in the newest checkpoint, or in a weight of a rank; may be repeated"
    parser.add_argument(
        "--flip-bit", action="append", default=[], choices=("checkpoint", "parameter"), help=about
    )
    slow = _pair(whole_number(0), _factor, ":", "RANK:FACTOR")
    about = "a rank that is FACTOR times slower for 30 s; may be repeated"
    parser.add_argument("--slow", action="append", default=[], type=slow, metavar="RANK:FACTOR", help=about)
    chosen = _pair(_kind, number_above_zero(), "=", "KIND=SECONDS")
    about = f"a fault at a time: {', '.join(_AT_A_TIME)}; may be repeated"
    parser.add_argument("--at", action="append", default=[], type=chosen, metavar="KIND=SECONDS", help=about)
    add_value(parser, "--chaos-seed", whole_number(0), "S", "seed of times and ranks, --seed for short", 0)
    about = "do not train the calm run, of as many steps"
    parser.add_argument("--no-calm", dest="calm", action="store_false", help=about)
    add_value(parser, "--output", Path, "FOLDER", "a new folder (default: run.folder with -chaos behind it)")
    return parser
