"""Writer of Megatron-LM checkpoints from canonical weights, row by row in Megatron-LM's layout.

Independent of the package's reader: row orders are explicit loops over heads and their dims.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.topology.shape import ModelShape

# Generation of names -> the name of each module of a layer.
_NAMES = {
    "core": {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_",
        "qkv": "self_attention.linear_qkv.",
        "q_norm": "self_attention.q_layernorm.",
        "k_norm": "self_attention.k_layernorm.",
        "o_proj": "self_attention.linear_proj.",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
        "fc1": "mlp.linear_fc1.",
        "down_proj": "mlp.linear_fc2.",
        "norm": "decoder.final_layernorm.",
        "layers": "decoder.layers.",
    },
    "legacy": {
        "input_layernorm": "input_norm.",
        "qkv": "self_attention.query_key_value.",
        "o_proj": "self_attention.dense.",
        "post_attention_layernorm": "post_attention_norm.",
        "fc1": "mlp.dense_h_to_4h.",
        "down_proj": "mlp.dense_4h_to_h.",
        "norm": "final_norm.",
        "layers": "layers.",
    },
}
_NAMES["local"] = _NAMES["core"] | {
    "input_layernorm": "input_layernorm.",
    "post_attention_layernorm": "pre_mlp_layernorm.",
}
_NAMES["old"] = _NAMES["legacy"] | {
    "input_layernorm": "input_layernorm.",
    "qkv": "attention.query_key_value.",
    "o_proj": "attention.dense.",
    "post_attention_layernorm": "post_attention_layernorm.",
    "norm": "final_layernorm.",
}


@dataclass(frozen=True)
class Written:
    """The form of a checkpoint: ranks, chunks per stage, `checkpoint_version`, generation of names, padded rows."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    version: float = 3.0
    names: str = "core"
    padded: int = 128
    iteration: int = 1000

    def folder_of(self, tp: int, pp: int) -> str:
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pipeline > 1 else "")


def arguments_of(shape: ModelShape, how: Written, **changes: Any) -> Namespace:
    """Return the args of a model of this shape, with some unrelated ones."""
    rotary = shape.position_embedding == "rope"
    args: dict[str, Any] = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "kv_channels": shape.head_dim,
        "group_query_attention": shape.num_key_value_heads != shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads
        if shape.num_key_value_heads != shape.num_attention_heads
        else 1,
        "max_position_embeddings": shape.max_position_embeddings,
        "position_embedding_type": "rope" if rotary else "learned_absolute",
        "rotary_base": int(shape.rope_theta),
        "rotary_percent": 1.0,
        "normalization": "RMSNorm" if shape.norm == "rms_norm" else "LayerNorm",
        "norm_epsilon": shape.rms_norm_eps,
        "swiglu": shape.gated_mlp,
        "bias_gelu_fusion": shape.hidden_act == "gelu_pytorch_tanh",
        "openai_gelu": False,
        "add_bias_linear": shape.mlp_bias,
        "add_qkv_bias": shape.attention_bias and not shape.mlp_bias,
        "qk_layernorm": shape.qk_norm is not None,
        "untie_embeddings_and_output_weights": not shape.tie_word_embeddings,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": how.padded,
        "make_vocab_size_divisible_by": 8,
        "init_method_std": shape.initializer_range,
        "tensor_model_parallel_size": how.tensor,
        "pipeline_model_parallel_size": how.pipeline,
        "virtual_pipeline_model_parallel_size": how.chunks if how.chunks > 1 else None,
        "params_dtype": torch.bfloat16,
        "window_size": None if shape.sliding_window is None else (shape.sliding_window - 1, 0),
        "seq_length": 8,
        "num_experts": None,
    }
    if shape.rope_scaling is not None and shape.rope_scaling.rope_type == "linear":
        args["rotary_seq_len_interpolation_factor"] = int(shape.rope_scaling.factor)
    return Namespace(**args | changes)


def write_megatron(
    folder: Path,
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    how: Written,
    *,
    zipped: bool = True,
    **changes: Any,
) -> Path:
    """Write all rank files and the file that names the iteration; return the folder. changes: to the args."""
    arguments = arguments_of(shape, how, **changes)
    for pp in range(how.pipeline):
        for tp in range(how.tensor):
            models = [chunk_of(shape, weights, how, tp, pp, chunk) for chunk in range(how.chunks)]
            state: dict[str, Any] = {"model": models[0]}
            if how.chunks > 1:
                state = {f"model{chunk}": model for chunk, model in enumerate(models)}
            state |= {
                "args": arguments,
                "iteration": how.iteration,
                "rng_state": [{"torch": torch.get_rng_state()}],
            }
            if how.version:
                state["checkpoint_version"] = how.version
            path = folder / f"iter_{how.iteration:07d}" / how.folder_of(tp, pp) / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(state, path, _use_new_zipfile_serialization=zipped)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(how.iteration))
    return folder


def chunk_of(
    shape: ModelShape, weights: Mapping[str, Tensor], how: Written, tp: int, pp: int, chunk: int
) -> dict[str, Any]:
    """Return the state of one model chunk on one rank: chunk number `chunk * pipeline + pp` in model order."""
    names, place, last = _NAMES[how.names], chunk * how.pipeline + pp, how.chunks * how.pipeline - 1
    size = shape.num_hidden_layers // (last + 1)
    outer: dict[str, Tensor] = {}
    block: dict[str, Tensor] = {}
    if place == 0:
        outer["embedding.word_embeddings.weight"] = _vocabulary(weights["model.embed_tokens.weight"], how, tp)
        if shape.position_embedding == "learned":
            outer["embedding.position_embeddings.weight"] = weights["model.embed_positions.weight"].clone()
    for layer in range(size):
        for name, tensor in _layer(shape, weights, how, tp, place * size + layer).items():
            block[f"{names['layers']}{layer}.{name}"] = tensor
    if place == last:
        for kind in ("weight", "bias"):
            if f"model.norm.{kind}" in weights:
                block[names["norm"] + kind] = weights[f"model.norm.{kind}"].clone()
        if not shape.tie_word_embeddings:
            outer["output_layer.weight"] = _vocabulary(weights["lm_head.weight"], how, tp)
        elif last > 0:
            outer["head copy"] = _vocabulary(weights["model.embed_tokens.weight"], how, tp)
    if how.names in ("core", "local"):
        extra = dict.fromkeys(
            f"decoder.layers.{layer}.self_attention.linear_qkv._extra_state" for layer in range(size)
        )
        if "head copy" in outer:
            outer["output_layer.weight"] = outer.pop("head copy")
        return {**outer, **block, **extra}
    language_model: dict[str, Any] = {"transformer" if how.names == "old" else "encoder": block}
    state: dict[str, Any] = {"language_model": language_model}
    embedding = {
        name.split(".")[1]: {"weight": tensor}
        for name, tensor in outer.items()
        if name.startswith("embedding.")
    }
    if embedding:
        language_model["embedding"] = embedding
    if "output_layer.weight" in outer:
        language_model["output_layer"] = {"weight": outer["output_layer.weight"]}
    if "head copy" in outer:
        state["word_embeddings_for_head"] = {"weight": outer["head copy"]}
    return state


def _layer(
    shape: ModelShape, weights: Mapping[str, Tensor], how: Written, tp: int, layer: int
) -> dict[str, Tensor]:
    names, found = _NAMES[how.names], dict[str, Tensor]()

    def whole(name: str) -> Tensor | None:
        return weights.get(f"model.layers.{layer}.{name}")

    for kind in ("weight", "bias"):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            if (tensor := whole(f"{norm}.{kind}")) is not None:
                found[names[norm] + kind] = tensor.clone()
        if (tensor := whole(f"self_attn.q_norm.{kind}")) is not None:
            found[names["q_norm"] + kind] = tensor.clone()
            found[names["k_norm"] + kind] = weights[f"model.layers.{layer}.self_attn.k_norm.{kind}"].clone()
        if (query := whole(f"self_attn.q_proj.{kind}")) is not None:
            key, value = whole(f"self_attn.k_proj.{kind}"), whole(f"self_attn.v_proj.{kind}")
            assert key is not None and value is not None
            found[names["qkv"] + kind] = _fused(shape, how, tp, query, key, value)
        for row, module in (("o_proj", "self_attn.o_proj"), ("down_proj", "mlp.down_proj")):
            if (tensor := whole(f"{module}.{kind}")) is not None:
                found[names[row] + kind] = tensor.clone() if kind == "bias" else _columns(tensor, how, tp)
        if (up := whole(f"mlp.up_proj.{kind}")) is not None:
            gate = whole(f"mlp.gate_proj.{kind}")
            rows = [] if gate is None else _rows(gate, how, tp)
            found[names["fc1"] + kind] = torch.stack(rows + _rows(up, how, tp))
    return found


def _fused(shape: ModelShape, how: Written, tp: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return one rank's rows of query, key and value, in the order of the checkpoint version."""
    dims, heads, groups = range(shape.head_dim), shape.num_attention_heads, shape.num_key_value_heads
    if how.version < 2:
        held = range(tp * heads // how.tensor, (tp + 1) * heads // how.tensor)
        if how.version == 1:
            places = [(which, head, dim) for head in held for dim in dims for which in (query, key, value)]
        else:
            places = [(which, head, dim) for which in (query, key, value) for head in held for dim in dims]
    else:
        each, places = heads // groups, []
        for group in range(groups):
            for head in range(group * each, (group + 1) * each):
                places += [(query, head, dim) for dim in dims]
            places += [(key, group, dim) for dim in dims]
            places += [(value, group, dim) for dim in dims]
        size = len(places) // how.tensor
        places = places[tp * size : (tp + 1) * size]
    return torch.stack([which[head * shape.head_dim + dim] for which, head, dim in places])


def _rows(tensor: Tensor, how: Written, tp: int) -> list[Tensor]:
    size = len(tensor) // how.tensor
    return [tensor[row] for row in range(tp * size, (tp + 1) * size)]


def _columns(tensor: Tensor, how: Written, tp: int) -> Tensor:
    size = tensor.shape[1] // how.tensor
    return torch.stack([tensor[:, column] for column in range(tp * size, (tp + 1) * size)], dim=1)


def _vocabulary(table: Tensor, how: Written, tp: int) -> Tensor:
    padding = torch.full((how.padded - len(table), table.shape[1]), -7.0, dtype=table.dtype)
    return torch.stack(_rows(torch.cat([table, padding]), how, tp))
