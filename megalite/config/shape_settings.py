"""The settings of [model] that are fields of ModelShape: their types, limits, defaults and descriptions.

A new field of ModelShape becomes a setting by its line in `_DESCRIPTIONS`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic

from megalite.families.registry import FAMILIES
from megalite.families.rope import SCALINGS, scaling_words
from megalite.topology.shape import ModelShape, RopeScaling

_DESCRIPTIONS = {
    "family": "architecture, and whose files an export is written as",
    "vocab_size": 'rows of the embedding; "auto": the tokenizer\'s',
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width of the gated MLP",
    "num_hidden_layers": "decoder layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key and value heads; default: as many",
    "head_dim": "default: hidden_size / num_attention_heads",
    "max_position_embeddings": "longest sequence the model is meant for",
    "rope_theta": "base of the rotary frequencies",
    "rms_norm_eps": "added to the mean square in every norm",
    "tie_word_embeddings": "the head is the embedding",
    "initializer_range": "standard deviation of the initial weights",
    "position_embedding": "rotary angles, or a learned table added to the embedding",
    "norm": "the kind of all norms",
    "norm_placement": "norms before a block, after its sum, around it, on its output, or before parallel blocks",
    "attention_bias": "of query, key and value",
    "attention_output_bias": "of attention's output",
    "mlp_bias": "of the MLP's projections",
    "head_bias": "of the logits",
    "gated_mlp": "act(gate(x)) * up(x) in the MLP instead of act(up(x))",
    "hidden_act": "activation of the MLP",
    "qk_norm": "RMSNorm of query and key over each head, or over all heads",
    "sliding_window": "keys that a token sees, itself included",
    "full_attention_layers": "the first n layers use full attention instead of the sliding window",
    "full_attention_every": "every n-th layer uses full attention instead of the sliding window; 0: no layer",
    "embedding_scaled": "the embedding is multiplied by the root of hidden_size",
    "zero_centered_gamma": "norms multiply by 1 + weight",
    "query_pre_attn_scalar": "attention's scores are divided by its root; default: head_dim",
    "attn_logit_softcapping": "Gemma 2's 50: scores become cap * tanh(score / cap), in plain torch only",
    "final_logit_softcapping": "the same of logits; Gemma 2's 30",
    "rope_local_base_freq": "rope_theta of layers with a window, unscaled (Gemma 3: 10000); default: the same",
    "partial_rotary_factor": "share of each head that is rotated",
    "no_rope_every": "every n-th layer has no rotary embedding; 0: no layer",
    "embedding_multiplier": "factor of the embedding's output",
    "residual_multiplier": "factor of what each block adds to the residual stream",
    "logits_scaling": "divisor of the logits",
    "attention_multiplier": "factor of attention's scores; default: head_dim ** -0.5",
}
_ROPE_DESCRIPTIONS = {
    "factor": "how much longer sequences become",
    "low_freq_factor": "llama3's",
    "high_freq_factor": "llama3's",
    "original_max_position_embeddings": "llama3's, yarn's and longrope's original_max_position_embeddings",
    "beta_fast": "yarn: pairs that turn more often within the original length keep their frequency",
    "beta_slow": "yarn: pairs that turn less often have theirs divided by rope_factor",
    "truncate": "yarn: the ramp between the two begins and ends at whole pairs",
    "attention_factor": "yarn, longrope: factor of cosines and sines; default: computed from rope_factor",
    "mscale": "yarn: with rope_mscale_all_dim, another way to compute rope_attention_factor (DeepSeek)",
    "mscale_all_dim": "yarn: see rope_mscale",
    "short_factor": "longrope: divisor of each pair's frequency in sequences up to the original length",
    "long_factor": "longrope: the same in longer sequences",
}
# Types that a setting may have beside its field's own, and its default.
_LEFT_OPEN: Mapping[str, tuple[Any, Any]] = {
    "vocab_size": (Literal["auto"], "auto"),
    "num_key_value_heads": (None, None),
    "head_dim": (None, None),
}
_SHARES = ("partial_rotary_factor",)
# Above any size in use, and small enough that every rule can list the neighbours of a value at once.
_MOST = 2**31
_OF_A_FAMILY = frozenset(name for family in FAMILIES.values() for name in family.defaults)


def shape_settings() -> dict[str, tuple[Any, Any]]:
    """Return the settings as pydantic's create_model takes them: name -> (type, field).

    A field for which some family has another default has none of its own: unset, it is the family's.
    """
    settings = {"family": _setting(_one_of(FAMILIES), "llama", _DESCRIPTIONS["family"])}
    hints = get_type_hints(ModelShape)
    for each in fields(ModelShape):
        if each.name in _DESCRIPTIONS and each.name not in settings:
            settings[each.name] = _of_field(each, hints[each.name])
    hints, used = get_type_hints(RopeScaling), {name for names in SCALINGS.values() for name in names}
    description = "how rotary frequencies are scaled for longer sequences"
    settings["rope_type"] = _setting(_one_of(("default", *SCALINGS)), "default", description)
    for each in fields(RopeScaling):
        if each.name in used:
            kind, default = _limited(each, hints[each.name]), _default(each)
            settings[rope_setting(each.name)] = _setting(kind, default, _ROPE_DESCRIPTIONS[each.name])
    return settings


def rope_setting(name: str) -> str:
    """Return the setting that says a field of RopeScaling."""
    if name == "original_max_position_embeddings":
        return "rope_original_positions"
    return name if name == "rope_type" else f"rope_{name}"


def as_settings(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ModelShape as settings of [model]: rope_scaling is several of them."""
    scaling = shape.get("rope_scaling")
    stretched = {} if scaling is None else scaling_words(scaling)
    given = {name: value for name, value in shape.items() if name != "rope_scaling"}
    return given | {rope_setting(name): value for name, value in stretched.items()}


def model_shape(model: Any, vocab_size: int) -> ModelShape:
    """Return the shape that the settings of [model] describe.

    vocab_size: the tokenizer's, which counts where the setting is "auto".
    """
    heads = model.num_attention_heads
    given = {name: getattr(model, name) for name in _DESCRIPTIONS} | {
        "vocab_size": vocab_size if model.vocab_size == "auto" else model.vocab_size,
        "num_key_value_heads": model.num_key_value_heads or heads,
        "head_dim": model.head_dim or model.hidden_size // heads,
        "rope_scaling": _rope_scaling(model),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return ModelShape(**FAMILIES[model.family].defaults | chosen)


def longest_sequence_setting(shape: ModelShape) -> str:
    """Return the settings that limit the length of a sequence, as a message names them."""
    longest = "model.max_position_embeddings"
    extended = shape.longest_sequence != shape.max_position_embeddings
    return f"{longest} * model.rope_factor" if extended else longest


def _rope_scaling(model: Any) -> RopeScaling | None:
    kind = model.rope_type
    if kind == "default":
        return None
    return RopeScaling(kind, **{name: getattr(model, rope_setting(name)) for name in SCALINGS[kind]})


def _one_of(words: Iterable[str]) -> Any:
    return Literal.__getitem__(tuple(words))


def _of_field(field: Field[Any], hint: Any) -> tuple[Any, Any]:
    kind, default, description = _limited(field, hint), _default(field), _DESCRIPTIONS[field.name]
    if field.name in _LEFT_OPEN:
        other, default = _LEFT_OPEN[field.name]
        kind = kind | other
    elif field.name in _OF_A_FAMILY:
        kind, default, description = kind | None, None, f"{description}; default: the family's"
    return _setting(kind, default, description)


def _setting(kind: Any, default: Any, description: str) -> tuple[Any, Any]:
    return kind, pydantic.Field(default, description=description)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return 1.0 if field.name == "factor" else ...


def _limited(field: Field[Any], hint: Any) -> Any:
    """The field's type with the limits of its values: whole numbers from 1, or from 0 where the default is 0."""
    return reduce(or_, _limited_members(field, hint))


def _limited_members(field: Field[Any], hint: Any) -> Iterator[Any]:
    for kind in get_args(hint) if NoneType in get_args(hint) else (hint,):
        if kind is int:
            yield Annotated[int, pydantic.Field(ge=0 if field.default == 0 else 1, lt=_MOST)]
        elif kind is float:
            yield _number(field.name)
        elif get_origin(kind) is tuple:
            # A TOML array is a list, and frozen models hold tuples.
            numbers: Any = tuple.__class_getitem__((_number(field.name), ...))
            yield Annotated[numbers, pydantic.Field(strict=False)]
        else:
            yield None if kind is NoneType else kind


def _number(name: str) -> Any:
    if name == "factor":
        return Annotated[float, pydantic.Field(ge=1)]
    if name in _SHARES:
        return Annotated[float, pydantic.Field(gt=0, le=1)]
    return Annotated[float, pydantic.Field(gt=0)]
