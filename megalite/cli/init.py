"""megalite init: write a commented RUN.toml for your text; asks three questions unless flags answer them."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.cli.arguments import Parser, add_value, whole_number
from megalite.cli.first_run import starter_for
from megalite.cli.results import report
from megalite.config.first_run import SIZES, Size
from megalite.config.flags import apply_overrides
from megalite.config.load import load_run
from megalite.config.output.summary import parameters_line
from megalite.config.sections.describe import section_models
from megalite.config.sections.toml import format_value
from megalite.config.sections.unchecked import SettingsDraft
from megalite.errors import ConfigError, Problem, write_remedy
from megalite.planner.memory import needs_line

_COMMENT_COLUMN, _LONGEST_LINE = 32, 100
_ORDER = ("run", "data", "tokenizer", "model", "parallel", "training", "optimizer", "deepspeed")
# Comments that say more of a setting than its description does.
_COMMENTS = {
    "model.vocab_size": "the tokenizer's, not the preset's",
    "parallel.data": "replicas; tensor * context * pipeline * data processes",
    "training.micro_batch_size": "sequences per forward; lower it if memory is short",
    "data.split": "fractions for training and validation",
    "tokenizer.vocab_size": "trains a tokenizer; or path = an existing one",
}


def run(arguments: Sequence[str]) -> int:
    """Write the run file and return the exit code. Raises ConfigError, DataError."""
    options = command_parser().parse_args(arguments)
    path: Path = options.run_file
    if path.exists() and not options.force:
        problem = Problem(
            "RUN.toml", f"{path} exists", "name another file, or add --force to replace it", {"--force": True}
        )
        raise ConfigError([problem], "megalite init")
    source, size, processes = _answers(options)
    draft = _draft(source, size, processes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_lines(draft, path)) + "\n", encoding="utf-8")
    except OSError as error:
        remedy = write_remedy(error, full="") or "name another file"
        problem = Problem("RUN.toml", f"{path} cannot be written ({error.strerror})", remedy)
        raise ConfigError([problem], "megalite init") from error
    config = load_run(path).config
    report(run_file=path, settings=draft.values, next=["megalite", "train", str(path)])
    print(f"{path}: parameters {parameters_line(config)}")
    if needs := needs_line(config):
        print(f"needs about {needs}: bf16 AdamW without activations, 20 tokens per parameter")
    print(f"next: megalite train {path}")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite init", description=__doc__)
    default, about = Path("run.toml"), "file to write (run.toml)"
    parser.add_argument("run_file", type=Path, nargs="?", default=default, metavar="RUN.toml", help=about)
    parser.add_argument("--source", metavar="TEXT", help='text file, folder, .jsonl, .parquet or "stdlib"')
    parser.add_argument("--size", choices=SIZES, help="size of the model (tiny)")
    add_value(parser, "--processes", whole_number(1), "N", "number of ranks, one per GPU (1)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def _answers(options: argparse.Namespace) -> tuple[str, str, int]:
    """Return text, size and processes: as given, else asked in a terminal, else the default.

    Raises ConfigError without a terminal if the text is not given.
    """
    asks = sys.stdin.isatty()
    if options.source is None and not asks:
        problem = Problem("--source", "is required without a terminal", "add --source book.txt")
        raise ConfigError([problem], "megalite init")
    source = options.source or _ask('text to train on (file, folder or "stdlib")', "", _existing)
    asks = asks and options.source is None
    names = ", ".join(SIZES)
    size = options.size or (_ask(f"size of the model ({names})", "tiny", _known_size) if asks else "tiny")
    processes = options.processes or (
        _ask("number of processes, one per GPU", "1", whole_number(1)) if asks else 1
    )
    return source, size, int(processes)


def _ask(question: str, default: str, parse: Callable[[str], Any]) -> Any:
    """Ask until the answer is valid. Raises ConfigError at the end of the input."""
    early = Problem("the answers", "ended early", "add --source book.txt")
    while True:
        try:
            answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        except EOFError:
            raise ConfigError([early], "megalite init") from None
        try:
            return parse(answer)
        except argparse.ArgumentTypeError as error:
            print(error)


def _known_size(answer: str) -> str:
    if answer not in SIZES:
        raise argparse.ArgumentTypeError(f"{answer!r} is not one of {', '.join(SIZES)}")
    return answer


def _existing(answer: str) -> str:
    if answer != "stdlib" and not Path(answer).expanduser().exists():
        raise argparse.ArgumentTypeError(f"{answer!r} does not exist")
    return answer


def _draft(source: str, size: str, processes: int) -> SettingsDraft:
    """Return the settings of the run. Raises ConfigError and DataError for a text or layout that does not fit."""
    flags = [f"--data.source={format_value(source)}", *_layout(SIZES[size], processes)]
    starter = starter_for([source], size=size)
    load_run(None, flags, places=True, starter=starter)
    draft = SettingsDraft("megalite init")
    apply_overrides(draft, flags)
    starter.name_model(draft)
    starter.fill(draft)
    return draft


def _layout(size: Size, processes: int) -> Iterator[str]:
    """Yield the flags of the layout: tensor parallelism as far as the size asks for it, then data parallelism."""
    tensor = math.gcd(processes, size.tensor)
    if tensor > 1:
        yield from (f"--parallel.tensor={tensor}", "--parallel.sequence=true")
    yield f"--parallel.data={processes // tensor}"
    if size.settings and processes // tensor > 1:
        yield "--deepspeed.zero_optimization.stage=1"


def _lines(draft: SettingsDraft, path: Path) -> Iterator[str]:
    yield f"# Train with: megalite train {path}"
    yield "# More settings: megalite train --help SECTION, for example --help training"
    known = [name for name in _ORDER if name in draft.values]
    for section in known + [name for name in draft.values if name not in known]:
        yield from _table(section, draft.values[section])


def _table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    keys = [key for key, value in table.items() if not isinstance(value, dict)]
    if keys:
        yield from ("", f"[{name}]")
    for key in keys:
        line, comment = f"{key} = {format_value(table[key])}", _comment(name, key)
        commented = f"{line:<{_COMMENT_COLUMN}}# {comment}"
        yield commented if comment and len(commented) <= _LONGEST_LINE else line
    for key in table.keys() - set(keys):
        yield from _table(f"{name}.{key}", table[key])


def _comment(section: str, key: str) -> str:
    """Return what a setting is, in a few words: its description up to the first semicolon."""
    model = section_models().get(section)
    field = None if model is None else model.model_fields.get(key)
    description = "" if field is None else (field.description or "").partition(";")[0]
    return _COMMENTS.get(f"{section}.{key}", description)
