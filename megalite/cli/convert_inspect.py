"""megalite convert inspect: print what a checkpoint or weight folder holds."""

import argparse
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import find_checkpoint, require_whole
from megalite.checkpoint.manifest import MANIFEST, WEIGHT, Manifest
from megalite.cli.results import report
from megalite.config.sources.peft import ADAPTER_CONFIG, ADAPTER_FILE
from megalite.convert.foreign.formats import find_format
from megalite.convert.huggingface.files import header_of, headers, is_folder_of_weights
from megalite.convert.huggingface.origin import read_object
from megalite.convert.huggingface.packed_header import INT8, SCALE, weights_of
from megalite.errors import counted


def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Print what a folder of any known format holds. Raises CheckpointError."""
    if (found := find_format(options.checkpoint)) is not None:
        kind, place = found
        lines = list(kind.loader().describe(place))
        report(format=kind.name, folder=place, lines=lines)
        print(*lines, sep="\n")
        return 0
    if is_folder_of_weights(options.checkpoint) and not (options.checkpoint / MANIFEST).is_file():
        return _inspect_huggingface(options.checkpoint)
    if (options.checkpoint / ADAPTER_CONFIG).is_file():
        return _inspect_adapter(options.checkpoint)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    print(
        f"{checkpoint}: complete, each element is stored exactly once; hashes are checked when it is loaded"
    )
    state = manifest.trainer_state
    report(
        format="megalite",
        folder=checkpoint,
        step=state["step"],
        layout=manifest.layout.named_sizes,
        model=vars(manifest.model),
        optimizer=dict(manifest.optimizer),
        bytes=sum(manifest.files.values()),
        elements={
            key: sum(prod(each.shape) for each in entries.values())
            for key, entries in manifest.tensors.items()
        },
    )
    for line in _facts(manifest):
        print(f"  {line}")
    for key, entries in manifest.tensors.items():
        print(f"{key}: {sum(prod(entry.shape) for entry in entries.values()):,} elements")
        if key == WEIGHT or options.all:
            width = max(map(len, entries))
            for name, entry in entries.items():
                where = counted(len(entry.shards), "shard")
                print(f"  {name:<{width}}  {_by(entry.shape):>16}  {entry.dtype}  {where}")
    return 0


def _inspect_adapter(folder: Path) -> int:
    """Print the tensors of an adapter that PEFT, or an export, has saved."""
    entries = header_of(folder / ADAPTER_FILE)
    _report("peft", folder, entries)
    print(f"{folder}: an adapter in PEFT's format, {len(entries):,} tensors")
    print(f"{WEIGHT}: {sum(prod(entry.shape) for entry in entries.values()):,} elements")
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        print(f"  {name:<{width}}  {_by(entry.shape):>16}  {entry.dtype}")
    return 0


def _inspect_huggingface(folder: Path) -> int:
    """Print the tensors of a folder; int8 weights as the values that their packed words hold."""
    files = headers(folder)
    tensors = {name: (entry, file) for file, entries in files.items() for name, entry in weights_of(entries)}
    int8 = {name: prod(entry.shape) for name, (entry, _) in tensors.items() if entry.dtype == INT8}
    scales = sum(prod(tensors[f"{name}{SCALE}"][0].shape) for name in int8 if f"{name}{SCALE}" in tensors)
    size_bytes = sum((folder / name).stat().st_size for name in files)
    elements = sum(prod(entry.shape) for entry, _ in tensors.values()) - scales
    _report("huggingface", folder, {name: entry for name, (entry, _) in tensors.items()})
    print(f"{folder}: a Hugging Face folder, {len(tensors):,} tensors")
    if (config := folder / "config.json").is_file():
        content = read_object(config, "name another folder").items()
        facts = (f"{key} {value}" for key, value in content if isinstance(value, int | float | str))
        print("  config.json:", ", ".join(facts))
    print(f"  {size_bytes:,} bytes in {counted(len(files), 'file')}")
    quantised = (
        f", {sum(int8.values()):,} of them int8 in {counted(len(int8), 'tensor')} with scales" if int8 else ""
    )
    print(f"{WEIGHT}: {elements:,} elements{quantised}")
    width = max(map(len, tensors), default=0)
    for name, (entry, file) in tensors.items():
        print(f"  {name:<{width}}  {_by(entry.shape):>16}  {entry.dtype}  {file}")
    return 0


def _report(name: str, folder: Path, entries: Mapping[str, Any]) -> None:
    tensors = {key: {"shape": list(entry.shape), "dtype": entry.dtype} for key, entry in entries.items()}
    report(format=name, folder=folder, tensors=tensors)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _facts(manifest: Manifest) -> list[str]:
    state, layout = manifest.trainer_state, manifest.layout
    total = sum(manifest.files.values())
    stages = ", ".join(_ranges(layers) for layers in manifest.stage_layers)
    model = ", ".join(f"{name} {value}" for name, value in vars(manifest.model).items())
    return [
        f"step {state['step']:,}, {state.get('samples', 0):,} sequences, {state.get('tokens', 0):,} tokens",
        f"written by {layout.text}, layers {stages}",
        f"{total:,} bytes in {counted(len(manifest.files), 'file')}",
        f"megalite {manifest.megalite}, torch {manifest.torch}",
        f"model: {model}",
        f"optimizer: {dict(manifest.optimizer)}",
        *([] if manifest.base is None else [f"beside an adapter, the weights of {manifest.base.weights}"]),
    ]


def _ranges(layers: Sequence[int]) -> str:
    """Format the layers of a stage as ranges of consecutive ones: "0-1+4-5"."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return "+".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
