"""megalite plan: predict memory, speed and days of a training on a cluster, and rank its layouts."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.cli.arguments import Parser, number_above_zero, whole_number
from megalite.config.load import load_run
from megalite.config.output.summary import TOKENS_PER_PARAMETER, memory_text, shape_line, tokens_text
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.toml import format_table, read_toml
from megalite.config.sources.presets import PRESETS
from megalite.errors import ConfigError, Problem
from megalite.planner.cluster import GIB, Cluster, card_named
from megalite.planner.fit import BAND_LENGTH, card_fits, memory_bands, on_one_card
from megalite.planner.memory import kinds_text, stage_memory
from megalite.planner.operations import ParameterCount, token_operations
from megalite.planner.planned_run import PlannedRun
from megalite.planner.search import LayoutSearch, PlannedLayout, needs_too_much, search

_SHOWN = 5
_ROWS = 32_000
_LENGTH = 4096
_TOKENS_A_STEP = 2**22
_REPLACED = {
    "parallel": ("schedule", "virtual_stages", "layers_per_stage"),
    "training": ("micro_batches", "recompute_layers", "recompute_ratio"),
    "deepspeed": ("zero_optimization",),
}
_COMMON = "model --nodes --card --cards-per-node --tokens --sequence-length --batch --fit --table --write --json --help"


def run(arguments: Sequence[str]) -> int:
    """Run `megalite plan MODEL --card NAME [options]`. Returns the exit code; ConfigError for wrong input."""
    options = _parser().parse_args(arguments)
    if options.table:
        _print(_table_lines())
        return 0
    for name in ("model", "card"):
        if getattr(options, name) is None:
            key = "MODEL" if name == "model" else "--card"
            message = "is needed, except with --table"
            raise ConfigError(
                [Problem(key, message, 'as in megalite plan llama-3.1-8b --card "H100 80GB HBM3"')]
            )
    cluster = _cluster(options)
    if options.write is not None:
        _require_new(options.write)
    base = _base_flags(options, cluster)
    config = load_run(base.file, base.flags).config
    rows = vocabulary(config) or _ROWS
    if config.training.precision == "auto":
        config = config.in_precision("bf16" if cluster.peak("bf16") else "fp16")
    if options.fit:
        _print(_fit_lines(config, rows, cluster))
        return 0
    found = search(config, rows, cluster)
    if options.json:
        print(json.dumps(_report(found, config, cluster), indent=2))
    else:
        _print(_lines(found, config, rows, cluster, options))
    if not found.fitting:
        return 1
    if options.write is not None:
        options.write.write_text(_run_file(base, found.fitting[0], config), encoding="utf-8")
        if not options.json:
            source = "" if base.file is not None else "set data.source, then "
            show = f"megalite config show {options.write} --world-size {cluster.cards}"
            print(f"written to {options.write}: {source}{show}")
    return 0


def _require_new(file: Path) -> None:
    if file.exists():
        raise ConfigError([Problem("--write", f"{file} exists already", "name another file")])
    if not file.parent.is_dir():
        raise ConfigError(
            [Problem("--write", f"{file.parent} is no folder", "make it, or name another file")]
        )


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        print(line)


class _Base:
    """The settings to start from. file: RUN.toml, or None. tables: those that a written run file begins with."""

    def __init__(self, file: Path | None, tables: dict[str, dict[str, Any]]):
        self.file, self.tables = file, tables

    @property
    def flags(self) -> list[str]:
        if self.file is not None:
            settings: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.data": 1}
            settings |= {"parallel.schedule": "1f1b", "parallel.virtual_stages": "auto"}
            settings |= {"parallel.layers_per_stage": "unset", "parallel.sequence": "false"}
        else:
            settings = {
                f"{section}.{key}": value
                for section, table in self.tables.items()
                for key, value in table.items()
            }
        return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def _base_flags(options: argparse.Namespace, cluster: Cluster) -> _Base:
    """Return the settings of MODEL: a preset, a run file, a config.json or its folder."""
    path = Path(options.model).expanduser()
    if path.suffix == ".toml":
        for name, key in (
            ("sequence_length", "training.sequence_length"),
            ("batch", "training.global_batch_size"),
        ):
            if getattr(options, name) is not None:
                message = f"has no effect with a run file, which is planned with its own {key}"
                raise ConfigError([Problem(f"--{name.replace('_', '-')}", message, f"set {key} in {path}")])
        return _Base(path, read_toml(path))
    if options.model in PRESETS:
        model: dict[str, Any] = {"preset": options.model}
        longest = PRESETS[options.model].get("max_position_embeddings", _LENGTH)
    elif path.exists():
        model, longest = {"hf_config": str(path)}, _LENGTH
    else:
        message = f'"{options.model}" is no preset, no RUN.toml, no config.json and no folder'
        raise ConfigError([Problem("MODEL", message, "megalite config presets lists the presets")])
    length = options.sequence_length or min(longest, _LENGTH)
    batch = options.batch or max(1, _TOKENS_A_STEP // length)
    training = {"steps": 1, "sequence_length": length, "micro_batch_size": 1, "global_batch_size": batch}
    tables: dict[str, dict[str, Any]] = {"model": model, "training": training, "data": {"source": "text/"}}
    config = load_run(None, _Base(None, tables).flags).config
    if vocabulary(config) is None:
        tables["tokenizer"] = {"vocab_size": _ROWS}
    parameters = ParameterCount.of(config.shape(vocabulary(config) or _ROWS)).total
    tokens = options.tokens or TOKENS_PER_PARAMETER * parameters
    training["steps"] = max(1, round(tokens / (batch * length)))
    return _Base(None, tables)


def _cluster(options: argparse.Namespace) -> Cluster:
    return Cluster(
        card_named(options.card),
        options.nodes,
        options.cards_per_node,
        options.network,
        options.efficiency,
        options.link_efficiency,
    )


def _lines(
    found: LayoutSearch, config: RunConfig, rows: int, cluster: Cluster, options: argparse.Namespace
) -> Iterator[str]:
    shape, length, batch = config.shape(rows), config.training.sequence_length, config.batch.global_batch_size
    operations = token_operations(shape, length).model
    yield f"{shape_line(config)}: {ParameterCount.of(shape).total:,} parameters, {operations / 1e9:,.1f} GFLOP a token"
    nodes = "one node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    yield (
        f"{cluster.cards:,} x {cluster.card} in {nodes}; {batch:,} sequences of {length:,} = "
        f"{batch * length:,} tokens a step"
    )
    yield (
        f"assumed: matrix products at {cluster.efficiency:.0%} of the card's peak, links at "
        f"{cluster.link_efficiency:.0%} of their rate, {cluster.network:g} GB/s a card between nodes"
    )
    yield ""
    if found.fitting:
        yield from _best_lines(found.fitting[0], config, rows, cluster, options)
        yield ""
        yield f"{'tokens/s':>12}{'memory':>11}  layout"
        for layout in found.fitting[:_SHOWN]:
            speed = batch * length / layout.time.total
            yield f"{speed:>12,.0f}{memory_text(layout.memory.peak):>11}  {_layout_text(layout)}"
        yield ""
    yield from _refusal_lines(found, cluster)


def _best_lines(
    best: PlannedLayout, config: RunConfig, rows: int, cluster: Cluster, options: argparse.Namespace
) -> Iterator[str]:
    length, time, memory = config.training.sequence_length, best.time, best.memory
    speed = config.batch.global_batch_size * length / time.total
    peak = cluster.peak(config.training.precision)
    assert peak is not None
    share = speed * token_operations(config.shape(rows), length).model / (peak * cluster.cards)
    yield f"best: {_layout_text(best)}"
    yield f"  memory  {memory_text(memory.peak)} of {cluster.facts.memory_gib} GiB on the fullest card"
    yield f"          {kinds_text(memory, config.optimizer.name)}"
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in vars(time).items() if seconds >= 0.005)
    yield f"  step    {time.total:.2f} s: {parts}"
    yield f"  speed   {speed:,.0f} tokens/s, {speed / cluster.cards:,.0f} a card, MFU {share:.0%}"
    if options.tokens:
        seconds = options.tokens / speed
        energy = seconds / 3600 * cluster.cards * cluster.facts.watts / 1e6
        cost = ""
        if options.price is not None:
            cost = f"; {seconds / 3600 * cluster.cards * options.price:,.0f} at {options.price:g} a card-hour"
        budget = f"{tokens_text(options.tokens)} tokens"
        yield f"  {budget}: {seconds / 86400:,.1f} days, {energy:,.1f} MWh at the cards' full power{cost}"


def _refusal_lines(found: LayoutSearch, cluster: Cluster) -> Iterator[str]:
    yield (
        f"{len(found.fitting):,} layouts fit, {len(found.too_large):,} need more memory, {len(found.refused):,} are "
        "refused"
    )
    if not found.fitting and found.too_large:
        least = found.too_large[0]
        yield f"nothing fits: the smallest, {_layout_text(least)}, {needs_too_much(least, cluster)}; use more cards"
    reasons = Counter(refused.problem.key for refused in found.refused)
    for key, number in reasons.most_common(3):
        refused = next(each for each in found.refused if each.problem.key == key)
        nearest = found.nearest(refused.choice)
        instead = "" if nearest is None else f"\n    nearest: {_layout_text(nearest)}"
        yield f"  {number:,} as {refused.problem}{instead}"


def _layout_text(layout: PlannedLayout) -> str:
    choice, run = layout.choice, layout.run
    words = [run.layout.text, f"micro batch {run.micro_batch_size} x {run.micro_batches}"]
    if choice.pipeline > 1:
        words.append(choice.schedule + (f" of {choice.chunks} chunks" if choice.chunks > 1 else ""))
    words += ["sequence parallel"] * choice.sequence + [f"ZeRO {choice.zero}"] * (choice.zero > 0)
    words += [f"recompute {choice.recompute}"] * (choice.recompute != "none")
    return ", ".join(words)


def _report(found: LayoutSearch, config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    tokens = config.batch.global_batch_size * config.training.sequence_length
    layouts = [
        {
            "settings": layout.choice.flags,
            "tokens_per_second": tokens / layout.time.total,
            "step_seconds": vars(layout.time),
            "memory_bytes": {**layout.memory.kinds, "host": layout.memory.host, "peak": layout.memory.peak},
        }
        for layout in found.fitting[:_SHOWN]
    ]
    refused = Counter(str(layout.problem) for layout in found.refused)
    return {
        "cluster": vars(cluster),
        "layouts": layouts,
        "fitting": len(found.fitting),
        "too_large": len(found.too_large),
        "refused": dict(refused.most_common()),
    }


def _fit_lines(config: RunConfig, rows: int, cluster: Cluster) -> Iterator[str]:
    run, limit = PlannedRun.of(config, rows), cluster.memory_bytes * cluster.usable
    yield f"{shape_line(config)}, {config.training.precision}, {config.optimizer.name}"
    yield f"one {cluster.card}: {cluster.facts.memory_gib} GiB, of which {limit / GIB:.1f} may be planned with"
    yield f"{'recompute':<12}{f'largest micro batch of {run.sequence_length:,} tokens':>38}{'longest sequence':>20}"
    fits = list(card_fits(run, limit))
    for fit in fits:
        batch, length = (
            f"{size:,}" if size else "none" for size in (fit.micro_batch_size, fit.sequence_length)
        )
        yield f"{fit.recompute:<12}{batch:>38}{length:>20}"
    if not any(fit.micro_batch_size or fit.sequence_length for fit in fits):
        states = stage_memory(on_one_card(run), 0).states
        yield f"weights, gradients and optimizer alone take {memory_text(states)}: plan with more cards"


def _table_lines() -> Iterator[str]:
    yield f"{'model':<7}{'parameters':>15}{'x 18 bytes':>13}{'activations':>13}{'logits':>10}{'peak':>10}"
    for band in memory_bands():
        memory = band.memory
        sizes = f"{memory_text(memory.states):>13}{memory_text(memory.activations):>13}{memory_text(memory.loss):>10}"
        yield f"{band.name:<7}{band.parameters:>15,}{sizes}{memory_text(memory.peak):>10}"
    yield ""
    yield "18 bytes a parameter: bf16 weights 2, fp32 gradients 4, fp32 weights 4, AdamW's moments 8."
    yield f"One sequence of {BAND_LENGTH:,} tokens at a time, selective recompute; peak: with 1 GiB for the process."


def _run_file(base: _Base, best: PlannedLayout, config: RunConfig) -> str:
    """Return the run file of a layout, with the settings that it was planned from."""
    tables = {name: dict(table) for name, table in base.tables.items()}
    # The layout's own are all that was planned with.
    for section, keys in _REPLACED.items():
        for key in keys:
            tables.get(section, {}).pop(key, None)
    for key, value in best.choice.flags.items():
        section, _, name = key.partition(".")
        if section == "deepspeed":
            tables.setdefault(section, {})["zero_optimization"] = {"stage": value}
        else:
            tables.setdefault(section, {})[name] = value
    training = tables["training"]
    training["global_batch_size"] = config.batch.global_batch_size
    lines = ["# written by megalite plan; set data.source to your text"]
    for name, table in tables.items():
        lines += format_table(name, table)
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite plan", description=__doc__, common=_COMMON.split())
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="preset, RUN.toml, config.json or its folder")
    add("--card", metavar="NAME", help='its name in torch, as "H100 80GB HBM3"')
    add("--nodes", type=whole_number(1), default=1, metavar="N", help="number of nodes (default 1)")
    add("--cards-per-node", type=whole_number(1), default=8, metavar="N", help="default: 8")
    add("--tokens", type=number_above_zero(), metavar="T", help="token budget, as 1e12: days and energy")
    add("--sequence-length", type=whole_number(1), metavar="S", help="default: 4096 or the model's")
    add("--batch", type=whole_number(1), metavar="B", help="sequences a step (default: 4 M tokens)")
    add("--fit", action="store_true", help="what fits one card")
    add("--table", action="store_true", help="memory by size of model")
    add("--write", type=Path, metavar="FILE", help="write the best layout's RUN.toml")
    add("--json", action="store_true", help="print the plan as JSON")
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
    return parser
