"""megalite convert: a checkpoint for Hugging Face or DeepSpeed and back, from Megatron-LM's, and a look into one."""

import argparse
import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

from megalite.checkpoint.folder import (
    checkpoints_of,
    find_checkpoint,
    find_tokenizer,
    last_checkpoints,
    require_whole,
)
from megalite.checkpoint.format import MANIFEST, WEIGHT, Manifest, check_coverage
from megalite.checkpoint.strict_json import parse
from megalite.cli.convert_import import add_import
from megalite.convert.huggingface.files import headers, is_folder_of_weights
from megalite.convert.megatron.folder import is_megatron_folder
from megalite.convert.universal.folder import find_universal
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.families.table import family_page
from megalite.topology.state import EMA, MASTER

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(arguments: Sequence[str]) -> int:
    """`megalite convert COMMAND`; the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _export(options: argparse.Namespace) -> int:
    checkpoints = _chosen(options)
    newest = max(checkpoints, key=lambda each: require_whole(each).step)
    tokenizer = options.tokenizer or find_tokenizer(newest, require_whole(newest))
    # Imported late, so that --help and a wrong path are answered at once.
    from megalite.checkpoint.tensor_file import DTYPES
    from megalite.convert.huggingface.export import export

    result = export(
        checkpoints,
        options.output,
        tokenizer,
        dtype=DTYPES[options.dtype],
        shard_size_bytes=options.shard_size,
        weights=options.weights,
    )
    source = str(newest) if len(checkpoints) == 1 else f"the mean of {', '.join(map(str, checkpoints))}"
    print(f"{result.folder}: from {source}, {len(result.files)} weight file(s) of {options.dtype}")
    if tokenizer is None:
        print("no tokenizer was found beside the checkpoint, so none was written; name one with --tokenizer")
    print("compared with transformers (largest differences, absolute and relative):")
    for check in result.comparisons:
        print(f"  {check.what:<32} {check.absolute:9.1e} {check.relative:9.1e}")
    return 0


def _chosen(options: argparse.Namespace) -> list[Path]:
    """The checkpoints to export: one, or those to average."""
    if options.average is None and options.steps is None:
        return [find_checkpoint(each) for each in options.checkpoint]
    if len(options.checkpoint) > 1:
        raise CheckpointError("name one run with --average or --steps, or the checkpoints themselves without")
    [run] = options.checkpoint
    return (
        last_checkpoints(run, options.average)
        if options.steps is None
        else checkpoints_of(run, options.steps)
    )


def _universal(options: argparse.Namespace) -> int:
    checkpoint = find_checkpoint(options.checkpoint)
    from megalite.convert.universal.export import export_universal

    manifest = export_universal(checkpoint, options.output)
    print(f"{options.output}: from {checkpoint}, {manifest.optimizer['step']:g} updates of AdamW in float32")
    print("load it with checkpoint.load_universal = true in DeepSpeed's config; its README.md shows how")
    return 0


def _families(options: argparse.Namespace) -> int:
    print(family_page(FAMILIES.values()), end="")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    if (universal := find_universal(options.checkpoint)) is not None:
        from megalite.convert.universal.load import describe_universal

        print(*describe_universal(universal), sep="\n")
        return 0
    if is_megatron_folder(options.checkpoint):
        from megalite.convert.megatron.load import described

        print(*described(options.checkpoint), sep="\n")
        return 0
    if is_folder_of_weights(options.checkpoint) and not (options.checkpoint / MANIFEST).is_file():
        return _inspect_huggingface(options.checkpoint)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    print(f"{checkpoint}: whole, every element of every tensor once; hashes are checked as it is loaded")
    for line in _facts(manifest):
        print(f"  {line}")
    for kind, entries in manifest.tensors.items():
        print(f"{kind}: {sum(prod(entry.shape) for entry in entries.values()):,} elements")
        if kind == WEIGHT or options.all:
            width = max(map(len, entries))
            for name, entry in entries.items():
                shards = len(entry.shards)
                where = f"{shards} shard{'s' * (shards > 1)}"
                print(f"  {name:<{width}}  {_by(entry.shape):>16}  {entry.dtype}  {where}")
    return 0


def _inspect_huggingface(folder: Path) -> int:
    found = headers(folder)
    tensors = {name: (entry, file) for file, entries in found.items() for name, entry in entries.items()}
    size_bytes = sum((folder / name).stat().st_size for name in found)
    elements = sum(prod(entry.shape) for entry, _ in tensors.values())
    print(f"{folder}: a Hugging Face folder, {len(tensors):,} tensors, each whole in one file")
    if (config := folder / "config.json").is_file():
        try:
            content = parse(config.read_text(encoding="utf-8"))
            facts = {key: value for key, value in content.items() if isinstance(value, int | float | str)}
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{config} is no model's configuration ({error})") from error
        print("  config.json:", ", ".join(f"{key} {value}" for key, value in facts.items()))
    print(f"  {size_bytes:,} bytes in {len(found)} files")
    print(f"{WEIGHT}: {elements:,} elements")
    width = max(map(len, tensors), default=0)
    for name, (entry, file) in tensors.items():
        print(f"  {name:<{width}}  {_by(entry.shape):>16}  {entry.dtype}  {file}")
    return 0


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _facts(manifest: Manifest) -> list[str]:
    state, layout = manifest.trainer_state, manifest.layout
    total = sum(manifest.files.values())
    stages = ", ".join(_runs(layers) for layers in manifest.stage_layers)
    model = ", ".join(f"{name} {value}" for name, value in vars(manifest.model).items())
    return [
        f"step {state['step']:,}, {state.get('samples', 0):,} sequences, {state.get('tokens', 0):,} tokens",
        f"written by tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, layers {stages}",
        f"{total:,} bytes in {len(manifest.files)} files",
        f"megalite {manifest.megalite}, torch {manifest.torch}",
        f"model: {model}",
        f"optimizer: {dict(manifest.optimizer)}",
    ]


def _runs(layers: Sequence[int]) -> str:
    """0-1+4-5: the runs of consecutive layers that a stage holds."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return "+".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def _size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) *([KMG]?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 500MB or 5GB")
    unit = (match[2] or "").upper()
    return int(match[1]) * _UNITS["" if unit == "B" else unit]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of checkpoints; write for example 5")
    return int(text)


def _steps(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} are not steps; write for example 100,200")
    return [int(word) for word in words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("export", help="write a Hugging Face folder, checked against transformers")
    _add_checkpoint(export, nargs="+", more="; of several, the mean of their weights")
    export.add_argument(
        "output", type=Path, metavar="OUTPUT", help="folder to write; an earlier export is replaced"
    )
    averaged = export.add_mutually_exclusive_group()
    averaged.add_argument(
        "--average",
        type=_count,
        metavar="N",
        help="the mean of a run's last N checkpoints (up to CHECKPOINT)",
    )
    averaged.add_argument(
        "--steps", type=_steps, metavar="A,B", help="the mean of a run's checkpoints of these steps"
    )
    export.add_argument(
        "--weights",
        choices=(WEIGHT, MASTER, EMA),
        help="what to write: the weights, a bf16 or fp16 run's float32 masters, the moving average (default: the"
        " weights; for a mean the masters of checkpoints that have them)",
    )
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    export.add_argument(
        "--shard-size", type=_size_bytes, default="5GB", metavar="SIZE", help="largest weight file (5GB)"
    )
    export.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to add (default: that of the run)"
    )
    export.set_defaults(command=_export)
    universal = commands.add_parser(
        "universal", help="write a DeepSpeed universal checkpoint, with AdamW's state"
    )
    _add_checkpoint(universal)
    universal.add_argument(
        "output",
        type=Path,
        metavar="OUTPUT",
        help="folder for engine.load_checkpoint; an earlier one is replaced",
    )
    universal.set_defaults(command=_universal)
    add_import(commands)
    families = commands.add_parser("families", help="each family's tensors, ours and how they are cut")
    families.set_defaults(command=_families)
    inspect = commands.add_parser(
        "inspect",
        help="names, shapes, layout, step and sizes; of Hugging Face, Megatron-LM and universal folders too",
    )
    _add_checkpoint(inspect)
    inspect.add_argument("--all", action="store_true", help="list the optimizer's tensors too")
    inspect.set_defaults(command=_inspect)
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser, nargs: str | None = None, more: str = "") -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs=nargs,
        metavar="CHECKPOINT",
        help=f"a checkpoint's folder, or a run's: its latest one{more}",
    )
