"""megalite convert: checkpoints to Hugging Face and DeepSpeed, from there and from Megatron-LM; a look into one."""

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
from megalite.checkpoint.hf_files import headers, is_folder_of_weights
from megalite.checkpoint.megatron_folder import is_megatron_folder
from megalite.checkpoint.strict_json import parse
from megalite.checkpoint.universal_folder import find_config, find_universal
from megalite.errors import CheckpointError
from megalite.topology.state import EMA, MASTER

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(arguments: Sequence[str]) -> int:
    """`megalite convert export|import|inspect`; the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _export(options: argparse.Namespace) -> int:
    checkpoints = _chosen(options)
    newest = max(checkpoints, key=lambda each: require_whole(each).step)
    tokenizer = options.tokenizer or find_tokenizer(newest, require_whole(newest))
    # Imported late, so that --help and a wrong path are answered at once.
    from megalite.checkpoint.huggingface import export
    from megalite.checkpoint.tensor_file import DTYPES

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


def _universal(options: argparse.Namespace) -> int:
    checkpoint = find_checkpoint(options.checkpoint)
    from megalite.checkpoint.universal import export_universal

    manifest = export_universal(checkpoint, options.output)
    print(f"{options.output}: from {checkpoint}, {manifest.optimizer['step']:g} updates of AdamW in float32")
    print("load it with checkpoint.load_universal = true; its README.md shows how")
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


def _import(options: argparse.Namespace) -> int:
    universal = find_universal(options.folder)
    if universal is None and is_megatron_folder(options.folder):
        return _import_megatron(options)
    if options.vocab_size is not None:
        raise CheckpointError(f"--vocab-size is for Megatron-LM checkpoints, and {options.folder} is none")
    if universal is not None:
        return _import_universal(options, universal)
    from megalite.config.huggingface import shape_of_folder
    from megalite.topology.parameters import parameter_count

    shape = shape_of_folder(options.hf_config or options.folder)
    from megalite.checkpoint.hf_import import import_checkpoint

    checkpoint = import_checkpoint(options.folder, shape, options.output)
    print(f"{checkpoint}: {parameter_count(shape):,} parameters of a {shape.family} from {options.folder}")
    return 0


def _import_universal(options: argparse.Namespace, universal: Path) -> int:
    from megalite.config.huggingface import shape_of_folder

    if (hf_config := options.hf_config or find_config(universal)) is None:
        raise CheckpointError(
            f"{universal} does not say which model it is of; name its config.json with --hf-config"
        )
    shape = shape_of_folder(hf_config)
    from megalite.checkpoint.universal_import import import_universal

    checkpoint = import_universal(universal, shape, hf_config, options.output)
    settings = require_whole(checkpoint).config["optimizer"].items()
    print(f"{checkpoint}: weights and AdamW's state of a {shape.family} from {universal}")
    print("trained with " + ", ".join(f"optimizer.{name} = {value}" for name, value in settings))
    return 0


def _import_megatron(options: argparse.Namespace) -> int:
    from megalite.checkpoint.megatron_import import import_megatron
    from megalite.topology.parameters import parameter_count

    done = import_megatron(options.folder, options.output, options.vocab_size)
    count, kind = parameter_count(done.shape), str(done.dtype).removeprefix("torch.")
    print(
        f"{done.checkpoint}: {count:,} parameters of {kind}, iteration {done.iteration} of {options.folder}"
    )
    for note in done.notes:
        print(f"  {note}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    if (universal := find_universal(options.checkpoint)) is not None:
        from megalite.checkpoint.universal_import import describe_universal

        print(*describe_universal(universal), sep="\n")
        return 0
    if is_megatron_folder(options.checkpoint):
        from megalite.checkpoint.megatron_import import described

        print(*described(options.checkpoint), sep="\n")
        return 0
    if is_folder_of_weights(options.checkpoint) and not (options.checkpoint / MANIFEST).is_file():
        return _inspect_huggingface(options.checkpoint)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    print(f"{checkpoint}: whole, every element of every tensor once")
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
    _add_import(commands)
    inspect = commands.add_parser(
        "inspect",
        help="names, shapes, layout, step and sizes; of Hugging Face, DeepSpeed and Megatron-LM folders too",
    )
    _add_checkpoint(inspect)
    inspect.add_argument("--all", action="store_true", help="list the optimizer's tensors too")
    inspect.set_defaults(command=_inspect)
    return parser


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    importing = commands.add_parser(
        "import",
        help="write the weights of a Hugging Face folder, Megatron-LM's or DeepSpeed's, as a checkpoint",
    )
    importing.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="config.json and safetensors files, a DeepSpeed universal checkpoint (with AdamW's state), or mp_rank_*"
        " folders of --ckpt-format torch",
    )
    importing.add_argument("output", type=Path, metavar="RUN", help="run folder to write")
    importing.add_argument(
        "--hf-config",
        type=Path,
        metavar="PATH",
        help="the model's config.json or its folder, where FOLDER has none",
    )
    importing.add_argument(
        "--vocab-size",
        type=int,
        metavar="TOKENS",
        help="the tokenizer's size, where a Megatron-LM checkpoint's table is padded and does not say it",
    )
    importing.set_defaults(command=_import)


def _add_checkpoint(parser: argparse.ArgumentParser, nargs: str | None = None, more: str = "") -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs=nargs,
        metavar="CHECKPOINT",
        help=f"a checkpoint's folder, or a run's: its latest one{more}",
    )
