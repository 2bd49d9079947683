"""The model families whose Hugging Face folders are read and written: what is fixed in each, and its words for it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.topology.parameters import ModelShape

_COMMON = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
    )
}


@dataclass(frozen=True)
class Family:
    """A family's place in transformers, and how its config.json says what a ModelShape says.

    keys: ModelShape field -> key of config.json, where they mean the same.
    fixed: ModelShape fields that differ from Llama's and cannot be chosen in this family.
    free: fields beyond the sizes that can; all others have ModelShape's defaults.
    required: keys of config.json that switch on what is not built here, with the values that leave it out.
    dropouts: keys of config.json for shares that a run drops by settings of its own.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: _COMMON)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ("attention_dropout",)


_SILU = {"hidden_act": ("silu",)}
_SLIDING = ("rope_theta", "rope_scaling", "sliding_window", "full_attention_layers")

FAMILIES = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        free=("rope_theta", "rope_scaling", "attention_bias", "attention_output_bias", "mlp_bias"),
        required=_SILU,
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        free=("rope_theta", "rope_scaling", "sliding_window"),
        required=_SILU,
    ),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", fixed={"attention_bias": True}, free=_SLIDING, required=_SILU
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        free=(*_SLIDING, "attention_bias", "attention_output_bias"),
        required=_SILU,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        free=("rope_theta", "sliding_window"),
        required=_SILU,
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
            "tie_word_embeddings": "tie_word_embeddings",
            "initializer_range": "initializer_range",
        },
        fixed={
            "position_embedding": "learned",
            "norm": "layer_norm",
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "gated_mlp": False,
            "hidden_act": "gelu_pytorch_tanh",
        },
        required={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        },
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
}

_SIZES = tuple(_COMMON)
# Which of these two differ matters only to one family's config.json.
_PAIRED = ("attention_bias", "attention_output_bias")


def inexpressible(shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """(field, value, the value that the family has) of all that the family's files cannot say."""
    family = FAMILIES[shape.family]
    expected = {each.name: each.default for each in ModelShape.__dataclass_fields__.values()} | dict(
        family.fixed
    )
    for name, value in asdict(shape).items():
        if name not in (*_SIZES, "family", *family.free) and value != expected[name]:
            yield name, value, expected[name]
    if set(_PAIRED) <= set(family.free) and shape.attention_bias != shape.attention_output_bias:
        yield "attention_output_bias", shape.attention_output_bias, shape.attention_bias
    if shape.family == "gpt2":
        if shape.num_key_value_heads != shape.num_attention_heads:
            yield "num_key_value_heads", shape.num_key_value_heads, shape.num_attention_heads
        if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
            yield "head_dim", shape.head_dim, shape.hidden_size // shape.num_attention_heads
