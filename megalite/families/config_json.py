"""config.json of a model, in the words of its family."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megalite.errors import CheckpointError
from megalite.families.records import FAMILIES, Family, inexpressible
from megalite.topology.shape import ModelShape


def hf_config(shape: ModelShape, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json for transformers 5 and, by the older names beside, for 4.

    dtype: of the weights, as safetensors and transformers name it: "float32", "bfloat16".

    Raises CheckpointError when the family's files cannot express the model.
    """
    family = FAMILIES[shape.family]
    foreign = [
        f"model.{name} = {value} ({shape.family} has {theirs})"
        for name, value, theirs in inexpressible(shape)
    ]
    if foreign:
        raise CheckpointError(
            f"a {shape.family} folder cannot express {', '.join(foreign)}: train with another model.family,"
            " or without export (checkpoint.export = false)"
        )
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(shape, name) for name, key in family.keys.items()},
        **{key: allowed[0] for key, allowed in family.required.items()},
        **dict.fromkeys(family.dropouts, 0.0),
        **_of_family(shape, family),
        # Without these keys transformers takes the family's own ids, be they in the vocabulary or not; the embedding
        # of a padding id would get no gradient.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **token_ids,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _of_family(shape: ModelShape, family: Family) -> dict[str, Any]:
    if "position_embedding" in family.fixed:
        return {}
    config: dict[str, Any] = _rope(shape)
    if "rope_local_base_freq" in family.free:
        local = shape.rope_local_base_freq or shape.rope_theta
        of_windows = {"rope_type": "default", "rope_theta": local}
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": of_windows,
        }
    if "attention_bias" in family.free:
        config["attention_bias"] = shape.attention_bias
    if "mlp_bias" in family.free:
        config["mlp_bias"] = shape.mlp_bias
    if "sliding_window" in family.free:
        config["sliding_window"] = shape.sliding_window
    if "query_pre_attn_scalar" in family.free:
        config["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or shape.head_dim
    if "full_attention_layers" in family.free:
        if "full_attention_every" not in family.free:
            sliding = shape.sliding_window is not None
            config["use_sliding_window"] = sliding
            config["max_window_layers"] = shape.full_attention_layers if sliding else shape.num_hidden_layers
        elif shape.full_attention_every:
            config["sliding_window_pattern"] = shape.full_attention_every
        config["layer_types"] = [
            "full_attention" if shape.window_of(layer) is None else "sliding_attention"
            for layer in range(shape.num_hidden_layers)
        ]
    return config


def _rope(shape: ModelShape) -> dict[str, Any]:
    theta = {"rope_theta": shape.rope_theta}
    scaling = shape.rope_scaling
    if scaling is None:
        return {**theta, "rope_parameters": {"rope_type": "default", **theta}}
    fields = asdict(scaling)
    if scaling.rope_type == "linear":
        fields = {"rope_type": "linear", "factor": scaling.factor}
    return {**theta, "rope_parameters": {**fields, **theta}, "rope_scaling": fields}
