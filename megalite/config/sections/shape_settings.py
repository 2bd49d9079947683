"""The settings of [model] that are fields of a shape, its experts or its latent attention: types, limits, defaults.

A new field becomes a setting by its line in `_DESCRIPTIONS`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic

from megalite.config.sections.section import one_of
from megalite.families.fields import EXPERT_SETTINGS, LATENT_SETTINGS, expert_fields, latent_fields
from megalite.families.registry import FAMILIES
from megalite.families.rope import SCALINGS, scaling_words
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling

_DESCRIPTIONS = {
    "family": "architecture; exports are files of this family",
    "vocab_size": 'rows of the embedding; "auto": number of ids of the tokenizer',
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width of the MLP's hidden layer",
    "num_hidden_layers": "number of decoder layers",
    "num_attention_heads": "number of query heads",
    "num_key_value_heads": "number of key and value heads; default: num_attention_heads",
    "head_dim": "width of a head; default: hidden_size / num_attention_heads",
    "max_position_embeddings": "longest sequence that the model is meant for",
    "rope_theta": "base of the rotary frequencies",
    "rms_norm_eps": "epsilon added to the mean square in every norm",
    "tie_word_embeddings": "use the embedding as the output head too",
    "initializer_range": "standard deviation of the initial weights",
    "position_embedding": "rotary embedding, or a learned table added to the embedding",
    "norm": "type of all norms",
    "norm_placement": "place of the norms: pre, post, sandwich, output, or parallel blocks",
    "attention_bias": "biases of the query, key and value projections",
    "attention_output_bias": "bias of attention's output projection",
    "mlp_bias": "biases of the MLP's projections",
    "head_bias": "bias of the logits",
    "gated_mlp": "gated MLP, act(gate(x)) * up(x), instead of act(up(x))",
    "hidden_act": "activation of the MLP",
    "qk_norm": "RMSNorm of queries and keys, over each head or over all heads",
    "sliding_window": "number of keys that a token attends to, itself included; default: all",
    "full_attention_layers": "use full attention instead of the sliding window in the first N layers",
    "full_attention_every": "use full attention instead of the sliding window in every N-th layer; 0: none",
    "embedding_scaled": "multiply the embedding by the root of hidden_size",
    "zero_centered_gamma": "multiply by 1 + weight in every norm",
    "query_pre_attn_scalar": "attention scores are divided by the root of this number; default: head_dim",
    "attn_logit_softcapping": "cap of the attention scores, cap * tanh(score / cap); uses plain torch",
    "attention_sinks": "trained logit of each head that takes part in its softmax (gpt-oss)",
    "final_logit_softcapping": "cap of the logits, cap * tanh(logit / cap)",
    "rope_local_base_freq": "rope_theta of layers with a sliding window; default: rope_theta",
    "partial_rotary_factor": "fraction of each head that is rotated",
    "no_rope_every": "no rotary embedding in every n-th layer; 0: all layers have it",
    "embedding_multiplier": "factor on the embedding's output",
    "residual_multiplier": "factor on the output of each block before the residual sum",
    "logits_scaling": "divisor of the logits",
    "attention_multiplier": "factor on the attention scores; default: head_dim ** -0.5",
    "kv_lora_rank": "latent attention: width of the vector that keys and values are made of",
    "q_lora_rank": "latent attention: width of the vector that queries are made of; default: no vector",
    "qk_nope_head_dim": "latent attention: values of a query and key head that are not rotated",
    "qk_rope_head_dim": "latent attention: rotated values of a query head, and of the one shared key",
    "v_head_dim": "latent attention: values of a value head",
    "num_experts": "experts in place of a layer's MLP; 0: a dense model",
    "num_experts_per_tok": "experts that a token is sent to",
    "moe_intermediate_size": "width of an expert's hidden layer",
    "shared_intermediate_size": "width of an MLP for all tokens beside the experts; 0: none",
    "router_bias": "bias of the router's logits",
    "expert_bias": "biases of the experts' projections",
    "swiglu_limit": "clamp of experts' gate and up projections (gpt-oss); default: silu(gate) * up",
    "router_scores": "scores of the experts: softmax over all of them, or sigmoid of each",
    "norm_topk_prob": "divide the weights of a token's experts by their sum",
    "routed_scaling_factor": "factor on the weights of a token's experts",
    "n_group": "groups of experts, from the best topk_group of which a token's experts are taken",
    "topk_group": "groups that a token's experts are taken from",
    "router_correction_bias": "bias of the scores for the choice of experts alone (DeepSeek-V3)",
    "first_k_dense_replace": "keep the dense MLP in the first N layers",
    "mlp_only_layers": "layers that keep the dense MLP, counted from 0, as in [0, 5]",
    "decoder_sparse_step": "experts in every N-th layer, the dense MLP in the others",
}
_ROPE_DESCRIPTIONS = {
    "factor": "factor by which sequences become longer than in pre-training",
    "low_freq_factor": "llama3: low_freq_factor of config.json",
    "high_freq_factor": "llama3: high_freq_factor of config.json",
    "original_max_position_embeddings": "llama3, yarn, longrope: sequence length of pre-training",
    "beta_fast": "yarn: pairs with more turns in the original length keep their frequency",
    "beta_slow": "yarn: pairs with fewer turns have their frequency divided by rope_factor",
    "truncate": "yarn: round the limits that rope_beta_fast and rope_beta_slow give to whole pairs",
    "attention_factor": "yarn, longrope: factor on cosines and sines; default: from rope_factor",
    "mscale": "yarn: numerator of rope_attention_factor (DeepSeek); with rope_mscale_all_dim",
    "mscale_all_dim": "yarn: denominator of rope_attention_factor (DeepSeek); with rope_mscale",
    "short_factor": "longrope: divisor of each pair's frequency up to the original length",
    "long_factor": "longrope: divisor of each pair's frequency in longer sequences",
}
# Types that a setting may have beside its field's own, and its default.
_LEFT_OPEN: Mapping[str, tuple[Any, Any]] = {
    "vocab_size": (Literal["auto"], "auto"),
    "num_key_value_heads": (None, None),
    "head_dim": (None, None),
    "num_experts_per_tok": (None, None),
    "moe_intermediate_size": (None, None),
    **{name: (None, None) for name in LATENT_SETTINGS},
}
# Defaults of fields that have none of their own.
_DEFAULTS: Mapping[str, Any] = {"factor": 1.0, "num_experts": 0}
_SHARES = ("partial_rotary_factor",)
# Above any size in use, and small enough that every rule can list the neighbours of a value at once.
_MOST = 2**31
# Rules list the parameters of every layer and expert.
_LIMITS = {"num_hidden_layers": 10_001, "num_experts": 4097}
_NO_SETTINGS = ("rope_scaling", "experts", "latent")
_OF_A_FAMILY = frozenset(name for family in FAMILIES.values() for name in family.defaults)


def shape_settings() -> dict[str, tuple[Any, Any]]:
    """Return the settings as pydantic's create_model takes them: name -> (type, field).

    A field for which some family has another default has none of its own: unset, it is the family's.
    """
    settings = {"family": _setting(one_of(FAMILIES), "llama", _DESCRIPTIONS["family"])}
    hints = get_type_hints(ModelShape)
    for field in fields(ModelShape):
        if field.name in _DESCRIPTIONS and field.name not in settings:
            settings[field.name] = _of_field(field.name, field, hints[field.name])
    hints = get_type_hints(ExpertShape)
    for field in fields(ExpertShape):
        if (name := EXPERT_SETTINGS.get(field.name)) is not None:
            settings[name] = _of_field(name, field, hints[field.name])
    hints = get_type_hints(LatentAttention)
    for field in fields(LatentAttention):
        settings[field.name] = _of_field(field.name, field, hints[field.name])
    hints, used = get_type_hints(RopeScaling), {name for names in SCALINGS.values() for name in names}
    description = "scaling of the rotary frequencies for longer sequences"
    settings["rope_type"] = _setting(one_of(("default", *SCALINGS)), "default", description)
    for field in fields(RopeScaling):
        if field.name in used:
            kind, default = _limited(field, hints[field.name]), _default(field)
            settings[rope_setting(field.name)] = _setting(kind, default, _ROPE_DESCRIPTIONS[field.name])
    return settings


def rope_setting(name: str) -> str:
    """Return the setting that says a field of RopeScaling."""
    if name == "original_max_position_embeddings":
        return "rope_original_positions"
    return name if name == "rope_type" else f"rope_{name}"


def as_settings(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a shape as settings of [model]: scaling, experts and latent attention are several of them."""
    scaling = shape.get("rope_scaling")
    stretched = {} if scaling is None else scaling_words(scaling)
    settings = {name: value for name, value in shape.items() if name not in _NO_SETTINGS}
    experts = expert_fields(shape["experts"]) if "experts" in shape else {}
    latent = latent_fields(shape["latent"]) if "latent" in shape else {}
    return settings | experts | latent | {rope_setting(name): value for name, value in stretched.items()}


def model_shape(model: Any, vocab_size: int) -> ModelShape:
    """Return the shape that the settings of [model] describe.

    vocab_size: the tokenizer's, which counts where the setting is "auto".
    """
    heads = model.num_attention_heads
    values = {name: getattr(model, name) for name in _DESCRIPTIONS} | {
        "vocab_size": vocab_size if model.vocab_size == "auto" else model.vocab_size,
        "num_key_value_heads": model.num_key_value_heads or heads,
        "head_dim": model.head_dim or model.hidden_size // heads,
        "rope_scaling": _rope_scaling(model),
    }
    chosen = {name: value for name, value in values.items() if value is not None}
    chosen = FAMILIES[model.family].defaults | chosen
    # Rules say what a mixture lacks.
    experts = {"num_experts_per_tok": 1, "moe_intermediate_size": chosen["intermediate_size"]}
    experts |= {name: chosen.pop(setting) for name, setting in EXPERT_SETTINGS.items() if setting in chosen}
    sizes = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2)
    sizes |= {name: chosen.pop(name) for name in LATENT_SETTINGS if name in chosen}
    latent = LatentAttention(**sizes) if "kv_lora_rank" in sizes else None
    if latent is not None:
        chosen["head_dim"] = latent.qk_head_dim
    if latent is None and not experts["num_experts"]:
        return ModelShape(**chosen)
    mixture = ExpertShape(**experts) if experts["num_experts"] else None
    return MixtureShape(**chosen, experts=mixture, latent=latent)


def longest_sequence_setting(shape: ModelShape) -> str:
    """Return the settings that limit the length of a sequence, as a message names them."""
    longest, scaling = "model.max_position_embeddings", shape.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        longest += " * model.rope_factor"
    return f"{longest} - adapter.tokens" if shape.prefix_tokens else longest


def _rope_scaling(model: Any) -> RopeScaling | None:
    kind = model.rope_type
    if kind == "default":
        return None
    return RopeScaling(kind, **{name: getattr(model, rope_setting(name)) for name in SCALINGS[kind]})


def _of_field(name: str, field: Field[Any], hint: Any) -> tuple[Any, Any]:
    kind, default, description = _limited(field, hint), _default(field), _DESCRIPTIONS[name]
    if name in _LEFT_OPEN:
        other, default = _LEFT_OPEN[name]
        kind = kind | other
    elif name in _OF_A_FAMILY:
        kind, default, description = kind | None, None, f"{description}; default: the family's"
    return _setting(kind, default, description)


def _setting(kind: Any, default: Any, description: str) -> tuple[Any, Any]:
    return kind, pydantic.Field(default, description=description)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return _DEFAULTS.get(field.name, ...)


def _limited(field: Field[Any], hint: Any) -> Any:
    """The field's type with the limits of its values: whole numbers from 1, or from 0 where the default is 0."""
    return reduce(or_, _limited_members(field, hint))


def _limited_members(field: Field[Any], hint: Any) -> Iterator[Any]:
    for kind in get_args(hint) if NoneType in get_args(hint) else (hint,):
        if kind is int:
            yield _count(field.name, 0 if _default(field) == 0 else 1)
        elif kind is float:
            yield _number(field.name)
        elif get_origin(kind) is tuple:
            # A TOML array is a list, and frozen models hold tuples.
            item = _count(field.name, 0) if get_args(kind)[0] is int else _number(field.name)
            numbers: Any = tuple.__class_getitem__((item, ...))
            yield Annotated[numbers, pydantic.Field(strict=False)]
        else:
            yield None if kind is NoneType else kind


def _count(name: str, least: int) -> Any:
    return Annotated[int, pydantic.Field(ge=least, lt=_LIMITS.get(name, _MOST))]


def _number(name: str) -> Any:
    if name in _SHARES:
        return Annotated[float, pydantic.Field(gt=0, le=1)]
    return Annotated[float, pydantic.Field(gt=0)]
