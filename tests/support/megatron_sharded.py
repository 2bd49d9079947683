"""Writer of Megatron-LM's torch_dist checkpoints without megatron-core: torch's own writer, and names by hand.

It writes two things that megatron-core 0.16 does not write on a CPU: the modules' order of Transformer Engine, and the
grid of `fully_sharded_model_space`.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from megalite.topology.shape import ModelShape
from tests.support.megatron_writer import Written, arguments_of, chunk_of

States = Mapping[str, Mapping[str, Tensor]]
"""weight, exp_avg, exp_avg_sq -> canonical name -> tensor."""
Form = Literal["none", "model space", "grid", "buckets"]
# The names of Transformer Engine's modules, which torch_dist has for every implementation, are those of "core".
_HOW = Written(padded=104, names="core")
_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 7}


def write_sharded(folder: Path, shape: ModelShape, states: States, form: Form, **changes: Any) -> Path:
    """Write one iteration with bf16 weights; return its folder. changes: to the args."""
    path = folder / f"iter_{_HOW.iteration:07d}"
    path.mkdir(parents=True)
    ranks = {key: chunk_of(shape, tensors, _HOW, 0, 0, 0) for key, tensors in states.items()}
    tensors: dict[str, Any] = {name: tensor.bfloat16() for name, tensor in _stacked(ranks["weight"]).items()}
    if form in ("model space", "grid"):
        for key, named in ranks.items():
            theirs = "fp32_param" if key == "weight" else key
            for name, tensor in _stacked(named).items():
                stored = tensor if form == "model space" else _grid(tensor, name)
                tensors[f"optimizer.state.{theirs}.{name}"] = stored
    elif form == "buckets":
        for key, named in ranks.items():
            theirs = "param" if key == "weight" else key
            buffer = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            tensors[f"{buffer}.bucket_idx_0.{theirs}"] = _buffer(named)
    torch_checkpoint.save(tensors, storage_writer=torch_checkpoint.FileSystemWriter(path), no_dist=True)
    arguments = arguments_of(shape, _HOW, consumed_train_samples=56, lr=1e-3, **changes)
    common: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": _HOW.iteration}
    if form != "none":
        common["optimizer"] = {"optimizer": {"param_groups": [_ADAM]}}
    torch.save(common, path / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(backend))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(_HOW.iteration))
    return path


def _stacked(named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Join the tensors of all layers under one name."""
    found: dict[str, Any] = {}
    for name, tensor in named.items():
        words = name.split(".")
        if tensor is None:
            continue
        if words[:2] == ["decoder", "layers"]:
            found.setdefault(".".join(words[:2] + words[3:]), []).append(tensor)
        else:
            found[name] = tensor
    return {name: torch.stack(each) if isinstance(each, list) else each for name, each in found.items()}


def _grid(tensor: Tensor, name: str) -> Tensor:
    """As two tensor ranks save it flattened: cut along rows or columns, or not at all; each layer is a cell."""
    dim = {"linear_proj.weight": -1, "linear_fc2.weight": -1}.get(".".join(name.split(".")[-2:]), -2)
    pieces = tensor.chunk(2, dim) if tensor.dim() > 1 and name.endswith(".weight") else [tensor]
    if not name.startswith("decoder.layers."):
        shape = [1] * tensor.dim()
        cells = [piece.reshape(-1) for piece in pieces]
    else:
        shape = [len(tensor), *[1] * (tensor.dim() - 1)]
        pieces = pieces if tensor.dim() > 2 else [tensor]
        cells = [piece.reshape(len(tensor), -1) for piece in pieces]
    shape[dim if tensor.dim() > 1 and len(pieces) > 1 else -1] *= len(pieces)
    return torch.stack(cells, dim=-2).reshape(*shape, -1)


def _buffer(named: Mapping[str, Tensor | None]) -> Tensor:
    """A buffer of one bucket: Transformer Engine's parameters from the last to the first, at multiples of 64."""
    order = [name for name, tensor in named.items() if tensor is not None]
    pieces, end = [], 0
    for name in sorted(order, key=_place, reverse=True):
        start = -(-end // 64) * 64
        tensor = named[name]
        assert tensor is not None
        pieces += [torch.full((start - end,), torch.nan), tensor.flatten().float()]
        end = start + prod(tensor.shape)
    return torch.cat(pieces)


def _place(name: str) -> tuple[int, int, int]:
    """The place of a parameter in the order in which Transformer Engine's modules register it."""
    words = name.split(".")
    if words[0] == "embedding":
        return (0, 0, int("position" in name))
    if words[1] == "final_layernorm" or words[0] == "output_layer":
        return (
            2,
            0,
            ["final_layernorm.weight", "final_layernorm.bias", "output_layer.weight"].index(
                ".".join(words[-2:])
            ),
        )
    within = (
        *(
            "linear_proj.weight",
            "linear_proj.bias",
            "linear_qkv.layer_norm_weight",
            "linear_qkv.layer_norm_bias",
        ),
        *("linear_qkv.weight", "linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight"),
        *(
            "linear_fc1.layer_norm_weight",
            "linear_fc1.layer_norm_bias",
            "linear_fc1.weight",
            "linear_fc1.bias",
        ),
        *("linear_fc2.weight", "linear_fc2.bias"),
    )
    return (1, int(words[2]), within.index(".".join(words[-2:])))
