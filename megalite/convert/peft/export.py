"""Write the adapter of a checkpoint as a folder that PEFT opens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.tensor_file import TensorInfo, write_tensor_file
from megalite.config.peft_names import adapted_linears, fused_with_others, peft_names, peft_targets
from megalite.config.sources.peft import ADAPTER_CONFIG, ADAPTER_FILE
from megalite.convert.average import AveragedWeights
from megalite.convert.exported_folder import exported_folder
from megalite.convert.huggingface.export import CARD, rounded, write_tokenizer
from megalite.convert.huggingface.model_card import adapter_card, is_our_card
from megalite.convert.huggingface.origin import GENERATION, Origin, find_origin
from megalite.convert.peft.base import write_base
from megalite.convert.peft.read import PROMPT
from megalite.errors import CheckpointError
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.parameters import PREFIX, trained_tensors
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class AdapterExport:
    """A published adapter: its folder, and the numbers of its trained values."""

    folder: Path
    trained: int


def export_adapter(
    checkpoint: Path,
    destination: Path,
    tokenizer_folder: Path | None,
    *,
    dtype: torch.dtype = torch.float32,
    weights: str | None = None,
) -> AdapterExport:
    """Write the trained tensors of an adapter's checkpoint as PEFT's files; one process.

    weights: as of `export`. Raises CheckpointError, leaving nothing behind, if the checkpoint is damaged or has no
    adapter, if PEFT cannot say it, or if `destination` has other content; DataError for the tokenizer.
    """
    with (
        exported_folder(destination, "an adapter", lambda folder: is_our_card(folder / CARD)) as partial,
        AveragedWeights([checkpoint], weights) as reader,
    ):
        manifest, shape = reader.manifest, reader.manifest.model
        if shape.adapter is None:
            raise CheckpointError(f"{checkpoint} has no adapter; leave out --adapter")
        if isinstance(shape.adapter, Prefix):
            _write_prefix(reader, shape, partial / ADAPTER_FILE, dtype)
        else:
            _write_lora(reader, shape, partial / ADAPTER_FILE, dtype)
        content = json.dumps(_adapter_config(manifest), indent=2)
        write_durably(partial / ADAPTER_CONFIG, content + "\n")
        if manifest.base is not None:
            write_base(manifest.base, partial)
        if tokenizer_folder is not None:
            token_ids, turn_ends = write_tokenizer(manifest, tokenizer_folder, partial)
            if turn_ends:
                generation = Origin(find_origin(checkpoint)).generation_with(token_ids, turn_ends)
                write_durably(partial / GENERATION, json.dumps(generation, indent=2) + "\n")
        trained = sum(prod(size) for size in trained_tensors(shape).values())
        write_durably(partial / CARD, adapter_card(manifest, reader.described(dtype), trained))
    return AdapterExport(destination, trained)


def _write_lora(reader: AveragedWeights, shape: ModelShape, path: Path, dtype: torch.dtype) -> None:
    if (fused := fused_with_others(shape)) is not None:
        raise CheckpointError(
            f"PEFT's files cannot say the adapter of {reader.checkpoint}: {shape.family} holds an adapted linear in"
            f" {fused}, with others or transposed; leave out --adapter to export the merged model"
        )
    names = peft_names(shape)
    infos = {names[name]: TensorInfo(dtype, size) for name, size in trained_tensors(shape).items()}
    ours = {theirs: name for name, theirs in names.items()}

    def read(theirs: str) -> Iterator[Tensor]:
        for block in reader.blocks(WEIGHT, ours[theirs]):
            yield rounded(block, dtype, theirs)

    write_tensor_file(path, infos, read)


def _write_prefix(reader: AveragedWeights, shape: ModelShape, path: Path, dtype: torch.dtype) -> None:
    """Write the keys and values of all layers; those of a projected prefix as its MLP computes them in float64."""
    sizes = trained_tensors(shape)
    trained = {name: reader.read(WEIGHT, name, full_slice(size)) for name, size in sizes.items()}
    parts = [
        name.removesuffix(".weight")
        for name in sizes
        if ".self_attn.prefix_" in name and name.endswith("weight")
    ]
    values = [trained[f"{part}.weight"].t() for part in parts]
    if isinstance(shape.adapter, Prefix) and shape.adapter.projection is not None:
        exact = {name: tensor.double() for name, tensor in trained.items()}
        trunk = f"{PREFIX}.hidden"
        hidden = exact[f"{PREFIX}.embedding"] @ exact[f"{trunk}.weight"].t() + exact[f"{trunk}.bias"]
        values = [hidden.tanh() @ exact[f"{part}.weight"].t() + exact[f"{part}.bias"] for part in parts]
    prompt = rounded(torch.cat(values, dim=1), dtype, PROMPT).contiguous()
    write_tensor_file(path, {PROMPT: TensorInfo(dtype, tuple(prompt.shape))}, lambda _: prompt)


def _adapter_config(manifest: Manifest) -> dict[str, Any]:
    shape = manifest.model
    assert shape.adapter is not None
    own = (
        _prefix_words(shape, shape.adapter)
        if isinstance(shape.adapter, Prefix)
        else _lora_words(manifest, shape.adapter)
    )
    return {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if manifest.base is None else manifest.base.weights,
        "inference_mode": True,
        **own,
    }


def _prefix_words(shape: ModelShape, prefix: Prefix) -> dict[str, Any]:
    width = shape.num_key_value_heads * shape.head_dim
    return {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": prefix.tokens,
        "num_transformer_submodules": 1,
        "num_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_key_value_heads,
        "token_dim": width,
        "encoder_hidden_size": width,
        "prefix_projection": False,
    }


def _lora_words(manifest: Manifest, adapter: Lora) -> dict[str, Any]:
    names = peft_names(manifest.model)
    # PEFT doubles rank and alpha where transformers 5 has gate and up of experts in one parameter: another scale there.
    rslora = adapter.rslora and not any(of_expert for _, of_expert in adapted_linears(manifest.model))
    whole = [
        name.removeprefix("base_model.model.").rsplit(".", 1)[0]
        for ours, name in names.items()
        if adapter.trains([ours]) and ours.endswith(".weight")
    ]
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha if rslora == adapter.rslora else adapter.scale * adapter.rank,
        "lora_dropout": (manifest.config.get("adapter") or {}).get("dropout", 0.0),
        "target_modules": peft_targets(manifest.model),
        "modules_to_save": whole or None,
        "bias": adapter.bias,
        "use_rslora": rslora,
        "use_dora": adapter.dora,
        "fan_in_fan_out": False,
    }
