"""Megatron-LM's tensors as a table: which registered parameter each is, and where its parts' rows lie within it.

Three generations of names: megatron-core's (decoder, linear_qkv), and two of the older models (encoder or transformer,
self_attention or attention). They cut where this model cuts; what differs is the order of rows in the fused two.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.topology.parameters import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, Parameter
from megalite.topology.shape import ModelShape

_WRAPPERS = ("module.", "model.", "language_model.")
_BLOCKS = r"(?:decoder|encoder|transformer)"
_LAYER = re.compile(rf"{_BLOCKS}\.layers\.(\d{{1,6}})\.(.+)\.(weight|bias)", re.ASCII)
_STEM = re.compile(r"(?P<block>.*\b(?:decoder|encoder|transformer)\.)layers\.\d+\.")
_LAYERS = "model.layers."
_FINAL_NORM = re.compile(rf"{_BLOCKS}\.final_(?:layer)?norm\.(weight|bias)")
_WITHIN = {
    **dict.fromkeys(
        ("input_layernorm", "input_norm", "self_attention.linear_qkv.layer_norm"), "input_layernorm"
    ),
    **dict.fromkeys(
        ("self_attention.linear_qkv", "self_attention.query_key_value", "attention.query_key_value"),
        "self_attn.qkv_proj",
    ),
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    **dict.fromkeys(
        ("self_attention.linear_proj", "self_attention.dense", "attention.dense"), "self_attn.o_proj"
    ),
    **dict.fromkeys(
        ("pre_mlp_layernorm", "post_attention_layernorm", "post_attention_norm", "mlp.linear_fc1.layer_norm"),
        "post_attention_layernorm",
    ),
    **dict.fromkeys(("mlp.linear_fc1", "mlp.dense_h_to_4h"), "mlp.up_proj"),
    **dict.fromkeys(("mlp.linear_fc2", "mlp.dense_4h_to_h"), "mlp.down_proj"),
}
_OUTSIDE = {
    **dict.fromkeys(("embedding.word_embeddings.weight", "word_embeddings.weight"), EMBEDDING),
    **dict.fromkeys(("embedding.position_embeddings.weight", "position_embeddings.weight"), POSITIONS),
    **dict.fromkeys(("output_layer.weight", "word_embeddings_for_head.weight"), HEAD),
}
# Amax histories of Transformer Engine, and rotary frequencies, which follow from the arguments.
_NO_WEIGHTS = ("_extra_state", ".inv_freq")


def is_weight(name: str) -> bool:
    return not name.endswith(_NO_WEIGHTS)


def flat_names(state: Mapping[str, Any], prefix: str = "", depth: int = 8) -> dict[str, Any]:
    """The values of nested tables by their dotted names: the older models' are nested, megatron-core's are not.

    A table nested deeper than `depth` stays a table, since a table may hold itself.
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and depth > 0
        flat |= flat_names(value, f"{name}.", depth - 1) if nested else {name: value}
    return flat


def layer_of(name: str) -> int | None:
    """The layer within its file that a tensor is of; None outside of the layers."""
    match = _LAYER.fullmatch(_bare(name))
    return int(match[1]) if match else None


def parameter_name(name: str, first_layer: int, *, gated: bool) -> str | None:
    """The registered parameter that a tensor holds; None where it is none of this model's.

    first_layer: the global index of what its file calls layer 0.
    """
    bare = _bare(name)
    if bare in _OUTSIDE:
        return _OUTSIDE[bare]
    if match := _FINAL_NORM.fullmatch(bare):
        return FINAL_NORM.replace("weight", match[1])
    match = _LAYER.fullmatch(bare)
    module = _WITHIN.get(match[2]) if match else None
    if match is None or module is None:
        return None
    if gated and module == "mlp.up_proj":
        module = "mlp.gate_up_proj"
    return f"model.layers.{first_layer + int(match[1])}.{module}.{match[3]}"


def missing_name(parameter: str, names: Mapping[str, str]) -> str:
    """Return the name that Megatron-LM would give a registered parameter that its checkpoint lacks.

    names: registered parameter -> the checkpoint's own name, of those that it has. A weight and its bias, and a
    module of two layers, are called alike; what the checkpoint has nothing like is called as in megatron-core.
    """
    module, _, kind = parameter.rpartition(".")
    twin = "bias" if kind == "weight" else "weight"
    if (sibling := names.get(f"{module}.{twin}")) is not None:
        return sibling.removesuffix(twin) + kind
    layers = {ours: match for ours, name in names.items() if (match := _STEM.match(name))}
    layer, _, rest = parameter.removeprefix(_LAYERS).partition(".")
    if not parameter.startswith(_LAYERS):
        if parameter in _OUTSIDE.values():
            return next(name for name, ours in _OUTSIDE.items() if ours == parameter)
        block = next((match["block"] for match in layers.values()), "decoder.")
        return f"{block}final_layernorm.{kind}"
    stem = next(match[0] for ours, match in layers.items() if ours.startswith(f"{_LAYERS}{layer}."))
    for ours, match in layers.items():
        if ours.endswith(f".{rest}"):
            return stem + names[ours].removeprefix(match[0])
    within = rest.removesuffix(f".{kind}").replace("gate_up_proj", "up_proj")
    return f"{stem}{next(name for name, ours in _WITHIN.items() if ours == within)}.{kind}"


def _bare(name: str) -> str:
    while wrapper := next((each for each in _WRAPPERS if name.startswith(each)), None):
        name = name.removeprefix(wrapper)
    # Transformer Engine fuses a norm with the linear that follows.
    return re.sub(r"\.layer_norm_(weight|bias)$", r".layer_norm.\1", name)


def rank_shape(parameter: Parameter, ranks: int) -> tuple[int, ...] | None:
    """The shape of one of `ranks` tensor-parallel ranks' tensors; None where they cannot cut it."""
    shape, dim = list(parameter.spec.full_shape), parameter.spec.dim
    if dim is not None:
        if shape[dim] % ranks:
            return None
        shape[dim] //= ranks
    return tuple(shape)


def part_of(
    parameter: Parameter, index: int, shards: Sequence[Tensor], shape: ModelShape, version: float
) -> Tensor:
    """The canonical tensor `parameter.spec.parts[index]`, whole, from all tensor-parallel ranks' tensors.

    version: the file's checkpoint_version, which says how query, key and value lie.
    """
    if parameter.spec.dim is None:
        return shards[0]
    if parameter.name.endswith((".qkv_proj.weight", ".qkv_proj.bias")):
        return torch.cat([_of_groups(each, index, shape) for each in _whole_groups(shards, shape, version)])
    # Each rank's rows are its share of the first part, then of the second: gate and up.
    parts = len(parameter.spec.parts)
    return torch.cat([shard.chunk(parts)[index] for shard in shards], parameter.spec.dim)


def _whole_groups(shards: Sequence[Tensor], shape: ModelShape, version: float) -> list[Tensor]:
    """Tensors of whole query groups, [group, its queries, key, value] as since version 2."""
    head = shape.head_dim
    if version >= 2:
        # Ranks that outnumber the groups hold slices of them.
        size = max(1, len(shards) // shape.num_key_value_heads)
        return [
            torch.cat(list(shards[at : at + size])) if size > 1 else shards[at]
            for at in range(0, len(shards), size)
        ]
    if version >= 1:  # [head, dim of the head, (query, key, value)]
        return [each.unflatten(0, (-1, head, 3)).transpose(1, 2).flatten(0, 2) for each in shards]
    return [each.unflatten(0, (3, -1, head)).transpose(0, 1).flatten(0, 2) for each in shards]


def _of_groups(rows: Tensor, index: int, shape: ModelShape) -> Tensor:
    """All queries (0), keys (1) or values (2) of a tensor of whole groups."""
    queries = shape.num_attention_heads // shape.num_key_value_heads
    groups = rows.unflatten(0, (-1, queries + 2, shape.head_dim))
    first, size = ((0, queries), (queries, 1), (queries + 1, 1))[index]
    return groups.narrow(1, first, size).flatten(0, 2)
