"""megalite plan: predict memory, speed and days of a training on a cluster, and rank its layouts.

--calibrate measures this machine first, and plans for it.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megalite.cli.arguments import Parser, number_above_zero, whole_number
from megalite.cli.plan_calibration import calibrated_machine
from megalite.cli.plan_cluster import take_cluster
from megalite.cli.plan_lines import fit_lines, plan_lines, plan_report, table_lines
from megalite.cli.plan_model import PLANNED_ROWS, PlanBase, base_flags, run_file
from megalite.cli.results import report
from megalite.config.sections.derived import vocabulary
from megalite.errors import ConfigError, Problem, named
from megalite.launcher.rank.environment import variables
from megalite.planner.calibration import DEFAULT_FILE
from megalite.planner.cluster import Cluster, Machine, card_named
from megalite.planner.search import search
from megalite.topology.context import CONTEXT_METHODS
from megalite.topology.sharding import divisors

_COMMON = (
    "model --nodes --card --cards-per-node --hostfile --tokens --sequence-length --batch --fit --table --write --json "
    "--calibrate --help"
)


def run(arguments: Sequence[str]) -> int:
    """Run `megalite plan MODEL --card NAME [options]`. Returns the exit code; ConfigError for wrong input."""
    options = command_parser().parse_args(arguments)
    if options.table:
        _print(table_lines())
        return 0
    measured = options.calibrate or options.calibration is not None
    if not measured:
        take_cluster(options, variables())
    for name in ("model",) if measured else ("model", "card"):
        if getattr(options, name) is None:
            key = "MODEL" if name == "model" else "--card"
            message = "is needed, except with --table" + " or --calibrate" * (name == "card")
            raise ConfigError(
                [Problem(key, message, 'as in megalite plan llama-3.1-8b --card "H100 80GB HBM3"')]
            )
    if options.write is not None:
        _require_new(options.write)
    base = base_flags(options)
    _require_axes(options, base)
    config = base.load()
    if options.context_method is not None:
        parallel = config.parallel.model_copy(update={"context_method": options.context_method})
        config = config.model_copy(update={"parallel": parallel})
    rows = vocabulary(config) or PLANNED_ROWS
    cluster: Machine
    if measured:
        config, cluster = calibrated_machine(options, config, rows)
    else:
        cluster = _cluster(options)
    if config.training.precision == "auto":
        config = config.in_precision("bf16" if cluster.peak("bf16") else "fp16")
    if options.fit:
        _print(fit_lines(config, rows, cluster))
        return 0
    asked = {name: getattr(options, name) for name in ("context", "expert", "expert_tensor")}
    found = search(config, rows, cluster, **asked)
    report(**plan_report(found, config, cluster))
    for line in plan_lines(found, config, rows, cluster, options):
        print(line)
    if not found.fitting:
        return 1
    if options.write is not None:
        with named(options.write):
            options.write.write_text(run_file(base, found.fitting[0], config), encoding="utf-8")
        source = "" if base.file is not None else "set data.source, then "
        show = f"megalite config show {options.write} --world-size {cluster.cards}"
        print(f"written to {options.write}: {source}{show}")
        report(written=options.write)
    return 0


def _require_axes(options: argparse.Namespace, base: PlanBase) -> None:
    """Raise ConfigError where the cards or other options cannot have --context or the axes of experts."""
    context, experts = options.context or 1, bool(options.expert or options.expert_tensor)
    formulas = base.mixture is not None
    for name in ("write", "calibrate", "calibration"):
        if formulas and getattr(options, name):
            message = "megalite train does not know this model yet"
            raise ConfigError([Problem(f"--{name}", message, f"plan without --{name}")])
        if context > 1 and name != "write" and getattr(options, name):
            message = "has no times of context parallelism"
            raise ConfigError([Problem(f"--{name}", message, f"plan without --{name}, or without --context")])
    if (experts or context > 1) and options.fit:
        message = "has no effect on one card, which --fit plans for"
        raise ConfigError([Problem("--expert" if experts else "--context", message, "leave it out")])
    cards = (options.nodes or 1) * (options.cards_per_node or 8)  # a measured machine has no number of nodes
    if cards % context:
        message = f"{context} does not divide {cards:,} cards"
        fits = max(size for size in divisors(cards) if size <= context)
        raise ConfigError([Problem.reset("--context", message, f"use {fits}", fits)])


def _require_new(file: Path) -> None:
    if file.exists():
        raise ConfigError([Problem("--write", f"{file} exists already", "name another file")])
    if not file.parent.is_dir():
        raise ConfigError(
            [Problem("--write", f"{file.parent} is no folder", "make it, or name another file")]
        )


def _print(lines: Iterator[str]) -> None:
    text = list(lines)
    report(lines=text)
    print(*text, sep="\n")


def _cluster(options: argparse.Namespace) -> Cluster:
    return Cluster(
        card_named(options.card),
        options.nodes,
        options.cards_per_node,
        options.network,
        options.efficiency,
        options.link_efficiency,
    )


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite plan", description=__doc__, common=_COMMON.split())
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="preset, RUN.toml, config.json or its folder")
    add("--card", metavar="NAME", help='its name in torch, as "H100 80GB HBM3"')
    add("--nodes", type=whole_number(1), metavar="N", help="default: 1, or SLURM's nodes")
    add("--cards-per-node", type=whole_number(1), metavar="N", help="default: 8, SLURM's, or this machine's")
    add("--hostfile", type=Path, metavar="FILE", help="nodes and cards: lines of NAME slots=N")
    add("--tokens", type=number_above_zero(), metavar="T", help="token budget, as 1e12: days and energy")
    add("--sequence-length", type=whole_number(1), metavar="S", help="default: 4096 or the model's")
    add("--batch", type=whole_number(1), metavar="B", help="sequences a step (default: 4 M tokens)")
    add("--fit", action="store_true", help="what fits one card")
    add("--table", action="store_true", help="memory by size of model")
    add("--write", type=Path, metavar="FILE", help="write the best layout's RUN.toml")
    add("--calibrate", action="store_true", help="measure this machine, one to two minutes, and plan for it")
    about = f"the measurement: read, or written by --calibrate (default there: {DEFAULT_FILE})"
    add("--calibration", type=Path, metavar="FILE", help=about)
    add(
        "--price",
        type=number_above_zero(),
        metavar="MONEY",
        help="of a card for an hour: the cost of --tokens",
    )
    add(
        "--network",
        type=number_above_zero(),
        default=50.0,
        metavar="GB/S",
        help="of a card to other nodes (50)",
    )
    add(
        "--efficiency", type=number_above_zero(1), default=0.55, metavar="X", help="of the card's peak (0.55)"
    )
    add(
        "--link-efficiency",
        type=number_above_zero(1),
        default=0.75,
        metavar="X",
        help="of links' rates (0.75)",
    )
    wish = "ranks that share each sequence (default: searched)"
    add("--context", type=whole_number(1), metavar="N", help=wish)
    method = "how these ranks exchange keys and values (the run file's, or auto)"
    add("--context-method", choices=CONTEXT_METHODS, help=method)
    for name, text in (
        ("expert", "ranks that share a layer's experts"),
        ("expert-tensor", "ranks that share each expert"),
    ):
        add(f"--{name}", type=whole_number(1), metavar="N", help=f"{text} (default: searched)")
    return parser
