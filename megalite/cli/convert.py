"""megalite convert: export to Hugging Face or DeepSpeed, import from these or other programs, inspect checkpoints."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.folder import (
    checkpoints_of,
    find_checkpoint,
    find_tokenizer,
    last_checkpoints,
    require_whole,
)
from megalite.checkpoint.manifest import WEIGHT
from megalite.cli.arguments import Parser, add_value, whole_number
from megalite.cli.convert_foreign import add_foreign_flags, imported_for_export
from megalite.cli.convert_import import add_import
from megalite.cli.convert_inspect import inspect_checkpoint
from megalite.cli.convert_quantise import add_quantise, check_quantise, export_quantised
from megalite.cli.results import report
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.families.table import family_page
from megalite.monitor.work import working
from megalite.topology.state import EMA, MASTER

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(arguments: Sequence[str]) -> int:
    """Run `megalite convert COMMAND` and return its exit code. Raises CheckpointError, DataError, ConfigError."""
    options = command_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _export(options: argparse.Namespace) -> int:
    named = options.checkpoint
    with imported_for_export(options) as run:
        options.checkpoint = named if run is None else [run]
        return _export_checkpoints(options, source=None if run is None else named[0])


def _export_checkpoints(options: argparse.Namespace, source: Path | None) -> int:
    """Export the chosen checkpoints; source: the folder of another program that they were imported from."""
    checkpoints = _chosen(options)
    newest = max(checkpoints, key=lambda checkpoint: require_whole(checkpoint).step)
    tokenizer = options.tokenizer or find_tokenizer(newest, require_whole(newest))
    check_quantise(options, tokenizer)
    # Imported here: torch takes seconds, and --help and a wrong path should be answered at once.
    from megalite.checkpoint.tensor_file import DTYPES
    from megalite.convert.huggingface.export import Export, ExportedWeights, export

    if options.adapter:
        return _export_adapter(options, checkpoints, tokenizer, DTYPES[options.dtype])

    def write(folder: Path) -> Export:
        dtype, shard_size = DTYPES[options.dtype], options.shard_size
        return export(weights, folder, tokenizer, dtype=dtype, shard_size_bytes=shard_size)

    weights = ExportedWeights(checkpoints, options.weights, options.base)
    with working(f"exporting to {options.output}"):
        result = export_quantised(options, write) if options.quantise else write(options.output)
    one = str(source or newest)
    origin = one if len(checkpoints) == 1 else f"the average of {', '.join(map(str, checkpoints))}"
    print(f"{options.output}: from {origin}, {len(result.files)} weight file(s) of {result.stored}")
    if tokenizer is None:
        print("no tokenizer was found for this checkpoint, so the export has none; name one with --tokenizer")
    report(
        output=options.output,
        source=origin,
        files=result.files,
        stored=result.stored,
        comparisons=[vars(check) for check in result.comparisons],
    )
    before = ", before quantisation" if options.quantise else ""
    print(f"compared with transformers{before} (largest absolute and relative difference):")
    for check in result.comparisons:
        print(f"  {check.what:<32} {check.absolute:9.1e} {check.relative:9.1e}")
    return 0


def _export_adapter(
    options: argparse.Namespace, checkpoints: list[Path], tokenizer: Path | None, dtype: "torch.dtype"
) -> int:
    from megalite.convert.peft.export import export_adapter

    if len(checkpoints) > 1:
        raise CheckpointError("--adapter writes the adapter of one checkpoint; name one")
    with working(f"exporting to {options.output}"):
        done = export_adapter(checkpoints[0], options.output, tokenizer, dtype=dtype, weights=options.weights)
    report(output=done.folder, source=checkpoints[0], trained=done.trained)
    print(f"{done.folder}: an adapter of {done.trained:,} values, from {checkpoints[0]}")
    return 0


def _chosen(options: argparse.Namespace) -> list[Path]:
    """Return the checkpoints to export; more than one are averaged."""
    if options.average is None and options.steps is None:
        return [find_checkpoint(each) for each in options.checkpoint]
    if len(options.checkpoint) > 1:
        raise CheckpointError(
            "--average and --steps take one run folder; to average several named checkpoints, leave out both flags"
        )
    [run] = options.checkpoint
    return (
        last_checkpoints(run, options.average)
        if options.steps is None
        else checkpoints_of(run, options.steps)
    )


def _universal(options: argparse.Namespace) -> int:
    checkpoint = find_checkpoint(options.checkpoint)
    from megalite.convert.universal.export import export_universal

    with working(f"exporting to {options.output}"):
        manifest = export_universal(checkpoint, options.output)
    report(output=options.output, source=checkpoint, updates=manifest.optimizer["step"])
    print(f"{options.output}: from {checkpoint}, {manifest.optimizer['step']:g} updates of AdamW in float32")
    print(
        "to load it, set checkpoint.load_universal = true in DeepSpeed's config; the folder's README.md shows how"
    )
    return 0


def _families(options: argparse.Namespace) -> int:
    page = family_page(FAMILIES.values())
    report(families=list(FAMILIES), page=page)
    print(page, end="")
    return 0


def _size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) *([KMG]?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 500MB or 5GB")
    unit = (match[2] or "").upper()
    return int(match[1]) * _UNITS["" if unit == "B" else unit]


def _steps(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of steps; write for example 100,200")
    return [int(word) for word in words]


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser(
        "export", help="write a Hugging Face folder and check it against transformers"
    )
    more = "; several: the average of their weights; or a checkpoint of another program, as `import` reads it"
    _add_checkpoint(export, nargs="+", more=more)
    export.add_argument(
        "output", type=Path, metavar="OUTPUT", help="folder to write; an earlier export is replaced"
    )
    about = "write a checkpoint's adapter alone, for PEFT (default: merged)"
    export.add_argument("--adapter", action="store_true", help=about)
    add_value(export, "--base", Path, "FOLDER", "the weights beside the adapter, where they have moved")
    averaged = export.add_mutually_exclusive_group()
    about = "average a run's last N checkpoints, up to CHECKPOINT"
    add_value(averaged, "--average", whole_number(1), "N", about)
    add_value(averaged, "--steps", _steps, "A,B", "average a run's checkpoints of these steps")
    export.add_argument(
        "--weights",
        choices=(WEIGHT, MASTER, EMA),
        help="state to write: the weights, the fp32 master weights of a bf16 or fp16 run, or the moving average"
        " (default: master where it exists, otherwise weight)",
    )
    kinds, about = ("float32", "bfloat16", "float16"), "number type of the weight files (float32)"
    export.add_argument("--dtype", choices=kinds, default="float32", help=about)
    add_value(export, "--shard-size", _size_bytes, "SIZE", "maximum size of a weight file", "5GB")
    add_value(export, "--tokenizer", Path, "FOLDER", "tokenizer to include (default: the run's)")
    add_quantise(export)
    add_foreign_flags(export)
    export.set_defaults(command=_export)


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite convert", description=__doc__)
    commands = parser.add_subparsers()
    _add_export(commands)
    universal = commands.add_parser(
        "universal", help="write a DeepSpeed universal checkpoint with AdamW's state"
    )
    _add_checkpoint(universal)
    universal.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="folder to write, for engine.load_checkpoint; an earlier universal checkpoint there is replaced",
    )
    universal.set_defaults(command=_universal)
    add_import(commands)
    families = commands.add_parser(
        "families",
        help="print the tensors of each family and how they are split",
    )
    families.set_defaults(command=_families)
    inspect = commands.add_parser(
        "inspect",
        help="print step, layout, sizes and tensors of a megalite, Hugging Face or other program's checkpoint",
    )
    _add_checkpoint(inspect)
    inspect.add_argument("--all", action="store_true", help="also list the optimizer's tensors")
    inspect.set_defaults(command=inspect_checkpoint)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser, nargs: str | None = None, more: str = "") -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs=nargs,
        metavar="CHECKPOINT",
        help=f"checkpoint folder, or run folder for its latest checkpoint{more}",
    )
