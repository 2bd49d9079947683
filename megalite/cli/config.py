"""megalite config: show a run as it would start, as TOML, with where each value came from."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.flags import split_overrides
from megalite.config.load import LoadedRun, load_run
from megalite.config.schema import STARTING_POINTS
from megalite.config.toml import format_key, format_value

_COLUMN = 40


def run(arguments: Sequence[str]) -> int:
    """`megalite config show RUN.toml [--section.key value ...]`; raises ConfigError with everything that is wrong."""
    own, overrides = split_overrides(arguments)
    options = _parser().parse_args(own)
    loaded = load_run(options.run_file, overrides, options.world_size)
    for line in _lines(loaded, str(options.run_file)):
        print(line)
    return 0


def _lines(loaded: LoadedRun, run_file: str) -> Iterator[str]:
    config = loaded.config
    yield f"# {run_file}, resolved: {config.layout.world_size} rank(s)"
    for note in loaded.notes:
        yield f"# note: {note}"
    for name, section in config.model_dump().items():
        yield ""
        if section is None:
            yield f"# no [{name}]"
        else:
            yield from _table(name, section, loaded)
    if config.zero_stage:
        yield from ("", "# DeepSpeed is handed:")
        yield from (f"# {line}" for line in json.dumps(config.deepspeed_json(), indent=2).splitlines())
    else:
        yield from ("", "# DeepSpeed is not used: its ZeRO stage is 0")


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="print the resolved run and the JSON that DeepSpeed is handed",
        epilog="--section.key value changes a setting, as for megalite train (megalite train --help lists them)",
    )
    show.add_argument("run_file", type=Path, metavar="RUN.toml")
    show.add_argument(
        "--world-size",
        type=_ranks,
        metavar="N",
        help="as if a launcher had started N ranks (default: megalite starts its own)",
    )
    return parser


def _ranks(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)
