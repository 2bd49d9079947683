"""megalite config: show a run's resolved settings as TOML with the origin of each value, or list the presets."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.cli.arguments import Parser, options_and_settings, whole_number
from megalite.cli.results import report
from megalite.config.load import LoadedRun, load_run
from megalite.config.output.equations import explanation
from megalite.config.output.summary import (
    TOKENS_PER_PARAMETER,
    memory_text,
    parameters_line,
    rank_share_line,
    tokens_text,
)
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.schema import STARTING_POINTS, ModelConfig
from megalite.config.sections.toml import format_key, format_value, setting_lines
from megalite.config.sources.presets import PRESETS
from megalite.errors import ConfigError
from megalite.planner.machine import memory_beyond_any_machine, memory_problems
from megalite.planner.memory import STATE_BYTES, memory_line, state_equations
from megalite.planner.memory_copies import copy_line
from megalite.topology.parameters import parameter_count

_COLUMN = 40
_OWN_VOCABULARY = 16384


def run(arguments: Sequence[str]) -> int:
    """Run `megalite config show RUN.toml [--section.key value ...]` or `megalite config presets`.

    Returns the exit code. Raises ConfigError with every problem of the run.
    """
    own, overrides = options_and_settings(arguments)
    options = command_parser().parse_args(own)
    if options.command == "presets":
        report(presets=[_preset(name) for name in PRESETS])
        for line in _preset_lines():
            print(line)
        return 0
    loaded = load_run(options.run_file, overrides, options.world_size, places=True)
    if too_large := list(memory_beyond_any_machine(loaded.config)):
        raise ConfigError(too_large, str(options.run_file))
    lines = list((_explanation if options.explain else _lines)(loaded, str(options.run_file)))
    config = loaded.config
    report(
        settings=config.model_dump(),
        origins=loaded.origins,
        notes=loaded.notes,
        ranks=config.layout.world_size,
    )
    if options.explain:
        report(lines=lines)
    print(*lines, sep="\n")
    return 0


def _lines(loaded: LoadedRun, run_file: str) -> Iterator[str]:
    config = loaded.config
    yield f"# {run_file}, resolved: {config.layout.world_size} rank(s)"
    yield f"# parameters: {parameters_line(config)}"
    if share := rank_share_line(config):
        yield f"# per rank: {share}"
    for note in loaded.notes:
        yield f"# note: {note}"
    for problem in memory_problems(config, config.layout.world_size):
        yield f"# note: not on this machine alone: {problem.key} = {problem.message}"
    for name, section in config.model_dump().items():
        yield ""
        if section is None:
            yield f"# no [{name}]"
        else:
            yield from _table(name, section, loaded)
    if config.zero_stage:
        yield from ("", "# DeepSpeed's configuration:")
        yield from (f"# {line}" for line in json.dumps(config.deepspeed_json(), indent=2).splitlines())
    else:
        yield from ("", "# DeepSpeed is not used: the ZeRO stage is 0")


def _explanation(loaded: LoadedRun, run_file: str) -> Iterator[str]:
    """Yield the equation of each derived value, and the memory of the largest rank by kind."""
    config, places = loaded.config, setting_lines(Path(run_file).read_text(encoding="utf-8-sig"))

    def origin(key: str) -> str:
        place = loaded.origin(key)
        if place != run_file:
            return place
        return Path(run_file).name + (f" line {places[key]}" if key in places else "")

    yield f"# {run_file}: the values that follow from others, and the origin of each number"
    yield from explanation(config, origin)
    rows, precision = vocabulary(config), config.training.precision
    if rows is not None:
        known = config.in_precision("bf16") if precision == "auto" else config
        yield memory_line(known, rows) + (
            ' (with training.precision = "bf16")' if known is not config else ""
        )
        yield from (f"  {equation}" for equation in state_equations(known, rows))
        if line := copy_line(config):
            yield f"  {line}"


def _table(name: str, table: Mapping[str, Any], loaded: LoadedRun) -> Iterator[str]:
    yield f"[{name}]"
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if key in STARTING_POINTS.get(name, ()):
            continue
        if value is None:
            yield f"# {key} is not set"
        elif key not in inner:
            origin = loaded.origin(".".join([*name.split("."), key][:2]))
            yield f"{f'{format_key(key)} = {format_value(value)}':<{_COLUMN}}  # {origin}"
    for key, value in inner.items():
        yield ""
        yield from _table(f"{name}.{format_key(key)}", value, loaded)


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite config", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("presets", help="list the values of model.preset with parameters and memory")
    show = commands.add_parser(
        "show",
        help="print the resolved settings and DeepSpeed's JSON",
        epilog="--section.key value changes a setting, as in megalite train (megalite train --help lists all)",
    )
    show.add_argument("run_file", type=Path, metavar="RUN.toml")
    show.add_argument(
        "--explain", action="store_true", help="print the equation of each derived value instead"
    )
    show.add_argument(
        "--world-size",
        type=whole_number(1),
        metavar="N",
        help="resolve for N ranks started by a launcher (default: megalite starts its own)",
    )
    return parser


def _preset(name: str) -> dict[str, Any]:
    model = ModelConfig(**PRESETS[name])
    return {"name": name, "family": model.family, "parameters": parameter_count(model.shape(_OWN_VOCABULARY))}


def _preset_lines() -> Iterator[str]:
    names = max(map(len, PRESETS)) + 1
    families = max(len(ModelConfig(**preset).family) for preset in PRESETS.values()) + 1
    columns = f"{'parameters':>15}{'bf16 weights':>14}{'AdamW state':>14}{'tokens':>10}"
    yield f"{'model.preset':<{names}}{'family':<{families}}{columns}"
    for name, preset in PRESETS.items():
        model = ModelConfig(**preset)
        count = parameter_count(model.shape(_OWN_VOCABULARY))
        weights, state = (memory_text(count * each) for each in (2, STATE_BYTES))
        tokens = tokens_text(count * TOKENS_PER_PARAMETER)
        yield f"{name:<{names}}{model.family:<{families}}{count:>15,}{weights:>14}{state:>14}{tokens:>10}"
    yield ""
    yield f"AdamW state: {STATE_BYTES} bytes per parameter over all ranks (bf16 weights 2, gradients 4, fp32 weights"
    yield f"4, moments 8), without activations. tokens: {TOKENS_PER_PARAMETER} per parameter, to train from nothing."
    yield f"Presets without a fixed vocabulary are counted with {_OWN_VOCABULARY:,} tokens."
