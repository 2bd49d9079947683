"""The global tensors of a torch_dist checkpoint as a table: which registered parameter stands where.

Homogeneous layers are stacked along a leading dim under one key, `decoder.layers.mlp.linear_fc2.weight`; other models
have a key a layer. The names are Transformer Engine's with both implementations.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalite.convert.megatron.names import is_weight, parameter_name
from megalite.errors import CheckpointError

OPTIMIZER = "optimizer."
_LAYERS = "decoder.layers."
_OUTSIDE = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.embed_positions": "embedding.position_embeddings",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
_WITHIN = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attn.qkv_proj": "self_attention.linear_qkv.",
    "self_attn.q_norm": "self_attention.q_layernorm.",
    "self_attn.k_norm": "self_attention.k_layernorm.",
    "self_attn.o_proj": "self_attention.linear_proj.",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.up_proj": "mlp.linear_fc1.",
    "mlp.gate_up_proj": "mlp.linear_fc1.",
    "mlp.down_proj": "mlp.linear_fc2.",
}
_STACKED = re.compile(rf"(.*\b|){re.escape(_LAYERS)}(?!\d)(.+)")


@dataclass(frozen=True)
class GlobalPlace:
    """A registered parameter's tensor: all that is under a key, or a layer of it. shape: without the dim of layers."""

    key: str
    layer: int | None
    shape: tuple[int, ...]


def is_model_key(key: str) -> bool:
    """Whether a tensor is one of the model's."""
    return not key.startswith((OPTIMIZER, "chained_")) and is_weight(key)


def global_places(
    shapes: Mapping[str, tuple[int, ...]], layers: int, *, gated: bool
) -> Iterator[tuple[str | None, GlobalPlace]]:
    """Yield a registered parameter and its place for all of the model's tensors; None for one of no parameter.

    shapes: key -> shape of the folder's tensors. layers: of the model. Raises CheckpointError for a stack of others.
    """
    for key, shape in shapes.items():
        if not is_model_key(key):
            continue
        stacked = _STACKED.fullmatch(key)
        if stacked is None:
            yield parameter_name(key, 0, gated=gated), GlobalPlace(key, None, shape)
            continue
        if shape[:1] != (layers,):
            raise CheckpointError(
                f"{key} has shape {shape}, but its args give {layers} layers; correct num_layers"
            )
        for layer in range(layers):
            one = f"{_LAYERS}{layer}.{stacked[2]}"
            yield parameter_name(one, 0, gated=gated), GlobalPlace(key, layer, shape[1:])


def global_name(parameter: str) -> str:
    """Return the key that a registered parameter of its own layer would have."""
    module, _, kind = parameter.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    layer, _, within = module.removeprefix("model.layers.").partition(".")
    return f"{_LAYERS}{layer}.{_WITHIN[within]}{kind}"
