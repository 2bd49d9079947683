"""Export a checkpoint as a Hugging Face folder: checked against transformers, published atomically."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.config.sources.hub import INDEX
from megalite.convert.average import AveragedWeights
from megalite.convert.exported_folder import exported_folder
from megalite.convert.huggingface.files import SINGLE
from megalite.convert.huggingface.model_card import is_our_card, model_card
from megalite.convert.huggingface.origin import CONFIG, GENERATION, Origin, find_origin
from megalite.convert.parity import (
    PartDifference,
    WholeWeights,
    compare_with_transformers,
    exported_dtype,
)
from megalite.convert.peft.base import folder_of_base
from megalite.convert.peft.merged import MergedCheckpoints
from megalite.data.chat.chat_template import load_chat_template
from megalite.data.chat.turn_end import turn_end
from megalite.data.tokenizers.tokenizer import (
    Tokenizer,
    copy_others,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    special_token,
)
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.families.tensors import FamilyTensor, InterleavedExperts, StackedExperts
from megalite.topology.parameters import canonical_tensors

CARD = "README.md"
SHARD_SIZE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Export:
    """A published export: its folder, its weight files, their type and origin, its comparisons with transformers."""

    folder: Path
    files: tuple[str, ...]
    comparisons: tuple[PartDifference, ...]
    stored: str


@dataclass(frozen=True)
class ExportedWeights:
    """Which weights to export: those of a checkpoint, or the average of several.

    weights: the state key, "weight", "master" (fp32) or "ema"; None: "master" where it exists, otherwise "weight".
    base: the folder of the weights beside an adapter, where they have moved.
    """

    checkpoints: Sequence[Path]
    weights: str | None = None
    base: Path | None = None


def export(
    source: Path | ExportedWeights,
    destination: Path,
    tokenizer_folder: Path | None,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size_bytes: int = SHARD_SIZE_BYTES,
) -> Export:
    """Write a checkpoint of any layout, or the average of several, as a folder that transformers loads; one process.

    source: a checkpoint, or more on which weights to write. An adapter is merged into its base. In memory are some rows
    of a tensor while files are written (of a family that holds matrices transposed or interleaved, three of them), and
    while they are compared one decoder layer in float32 with one more of its matrices.
    The folder appears only after transformers' modules, loaded from its files, agreed with our forward; an earlier
    export there is then replaced. Raises CheckpointError, leaving nothing behind, if they disagree, if a checkpoint is
    damaged, a weight is out of the range of `dtype`, or `destination` has other content; DataError for the tokenizer.
    """
    source = ExportedWeights([source]) if isinstance(source, Path) else source
    with exported_folder(
        destination, "a Hugging Face export", lambda folder: is_our_card(folder / CARD)
    ) as partial:
        with _whole_weights(source) as reader:
            manifest = reader.manifest
            files = _write_weights(reader, partial, dtype, shard_size_bytes)
            token_ids, turn_ends = (
                write_tokenizer(manifest, tokenizer_folder, partial) if tokenizer_folder else ({}, ())
            )
            origin = Origin(find_origin(reader.checkpoint))
            ours = hf_config(manifest.model, dtype_name(dtype), {})
            settings = manifest.config.get("model") or {}
            for name, content in (
                (CONFIG, origin.config_with(ours, token_ids, settings)),
                (GENERATION, origin.generation_with(token_ids, turn_ends)),
            ):
                write_durably(partial / name, json.dumps(content, indent=2) + "\n")
            comparisons = compare_with_transformers(reader, partial, dtype)
            stored = reader.described(dtype)
            card = model_card(manifest, stored, comparisons, averaged=reader.steps)
        write_durably(partial / CARD, card)
    return Export(destination, tuple(files), tuple(comparisons), stored)


@contextmanager
def _whole_weights(source: ExportedWeights) -> Iterator[WholeWeights]:
    """Yield a reader of the average of checkpoints, with its adapter merged into the base."""
    with AveragedWeights(source.checkpoints, source.weights) as reader:
        if reader.manifest.model.adapter is None:
            yield reader
            return
        if reader.manifest.model.prefix_tokens:
            raise CheckpointError(
                f"{reader.checkpoint}: a prefix cannot be merged into weights; export it with --adapter"
            )
        with MergedCheckpoints(reader, folder_of_base(reader.manifest.base, source.base)) as merged:
            yield merged


def plan_files(sizes_bytes: Mapping[str, int], shard_size_bytes: int) -> dict[str, list[str]]:
    """Return file name -> its tensors in order; a new file starts where the next tensor would exceed the size."""
    groups: list[list[str]] = []
    filled = 0
    for name, size_bytes in sizes_bytes.items():
        if not groups or filled + size_bytes > shard_size_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_weights(
    reader: WholeWeights, folder: Path, dtype: torch.dtype, shard_size_bytes: int
) -> list[str]:
    tensors = {tensor.name: tensor for tensor in family_tensors(reader.manifest.model)}
    shapes = canonical_tensors(reader.manifest.model)
    infos = {name: TensorInfo(exported_dtype(name, dtype), tensor.shape) for name, tensor in tensors.items()}
    files = plan_files({name: info.size_bytes for name, info in infos.items()}, shard_size_bytes)

    def read(name: str) -> Iterator[Tensor]:
        for block in _family_blocks(reader, tensors[name], shapes):
            yield rounded(block, infos[name].dtype, name)

    for file, names in files.items():
        write_tensor_file(folder / file, {name: infos[name] for name in names}, read)
    if len(files) > 1:
        total = sum(info.size_bytes for info in infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(_weight_map(files))}
        write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return list(files)


def read_family_tensor(
    reader: CheckpointReader | WholeWeights,
    state_key: str,
    tensor: FamilyTensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> Tensor:
    """Return a checkpoint's tensor of a state key in the family's form: parts concatenated, transposed.

    shapes: canonical name -> full shape, of the checkpoint's model.
    """
    return as_family_tensor(
        tensor, [reader.read(state_key, name, full_slice(shapes[name])) for name in tensor.parts]
    )


def as_family_tensor(tensor: FamilyTensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor of the family's folder that the canonical tensors, all of `tensor.parts`, make."""
    if isinstance(tensor, InterleavedExperts):
        of_experts = torch.stack(list(parts)).unflatten(0, (-1, tensor.alternating))
        return of_experts.transpose(1, -1).flatten(-2).contiguous()
    if len(parts) == 1:
        fused = parts[0]
    else:
        grouped = [part.unflatten(0, (tensor.groups, -1)) for part in parts]
        fused = torch.cat(grouped, dim=1).flatten(0, 1)
    return fused.t().contiguous() if tensor.transposed else fused.reshape(tensor.shape)


def rounded(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round to another dtype (nearest, ties to even). Raises CheckpointError for a value out of its range."""
    narrow = values.to(dtype)
    beyond = narrow.isinf() & values.isfinite()
    if beyond.any():
        value, most = values[beyond][0].item(), torch.finfo(dtype).max
        wider = "float32" if dtype == torch.bfloat16 else "bfloat16 or float32"
        raise CheckpointError(
            f"{name} has the weight {value:g}, but the largest {dtype_name(dtype)} is {most:g}; export with --dtype"
            f" {wider}"
        )
    return narrow


def _family_blocks(
    reader: WholeWeights, tensor: FamilyTensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Tensor]:
    """Yield one of the family's tensors in blocks of consecutive rows, or expert by expert."""
    if isinstance(tensor, StackedExperts):
        for expert in range(tensor.shape[0]):
            parts = (reader.read(WEIGHT, name, full_slice(shapes[name])) for name in tensor.of_expert(expert))
            yield torch.cat([*parts]).unsqueeze(0)
        return
    if tensor.transposed or tensor.groups > 1:
        yield read_family_tensor(reader, WEIGHT, tensor, shapes)
        return
    if isinstance(tensor, InterleavedExperts):
        for expert in range(tensor.shape[0]):
            yield read_family_tensor(reader, WEIGHT, tensor.of_expert(expert), shapes)
        return
    for name in tensor.parts:
        yield from reader.blocks(WEIGHT, name)


def _weight_map(files: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    for file, names in files.items():
        yield from ((name, file) for name in names)


def write_tokenizer(manifest: Manifest, source: Path, folder: Path) -> tuple[dict[str, int], Collection[int]]:
    """Copy the tokenizer; return the ids of its special tokens under config.json's keys, and those that end answers."""
    settings = manifest.config.get("tokenizer") or {}
    tokenizer = load_tokenizer(source, end_of_document=settings.get("end_of_document"))
    if tokenizer.vocab_size > manifest.model.vocab_size:
        raise CheckpointError(
            f"{source} has {tokenizer.vocab_size} tokens, but the model only {manifest.model.vocab_size}; name the"
            " tokenizer that the model was trained with"
        )
    if (source / "tokenizer_config.json").is_file():
        copy_tokenizer(source, folder)
    else:
        # For a tokenizer.json alone transformers would assume Llama's pre-tokenizer.
        save_tokenizer(tokenizer.backend, folder, tokenizer.end_of_document)
        copy_others(source, folder)
    if (template := settings.get("chat_template")) is not None:
        text = load_chat_template(source, template).for_export
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return _token_ids(tokenizer, folder), _turn_ends(manifest, tokenizer)


def _turn_ends(manifest: Manifest, tokenizer: Tokenizer) -> Collection[int]:
    """Return the ids with which the chat template ended answers in training; none of a run on text."""
    if (manifest.config.get("data") or {}).get("kind") not in ("instruct", "preference"):
        return ()
    name = (manifest.config.get("tokenizer") or {}).get("chat_template")
    return turn_end(load_chat_template(tokenizer.file.parent, name, tokenizer.end_of_document), tokenizer).ids


def _token_ids(tokenizer: Tokenizer, folder: Path) -> dict[str, int]:
    ids = {"eos_token_id": tokenizer.end_of_document_id}
    bos = special_token(folder, "bos_token")
    bos_id = None if bos is None else tokenizer.backend.token_to_id(bos)
    return ids if bos_id is None else {"bos_token_id": bos_id, **ids}
