"""The model families whose Hugging Face folders are read and written: what is fixed in each, and its words for it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megalite.topology.shape import ModelShape


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_COMMON = _same(
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


@dataclass(frozen=True)
class Family:
    """A family's place in transformers, and how its config.json says what a ModelShape says.

    keys: ModelShape field -> key of config.json, where they mean the same.
    fixed: ModelShape fields that differ from Llama's and cannot be chosen in this family.
    free: fields beyond the sizes that can; all others have ModelShape's defaults.
    required: keys of config.json that switch on what is not built here, with the values that leave it out.
    dropouts: keys of config.json for shares that a run drops by settings of its own.
    absent: what transformers takes for a key that config.json lacks, where that is not the default here.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: _COMMON)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ("attention_dropout",)
    absent: Mapping[str, Any] = field(default_factory=dict)


_SILU = {"hidden_act": ("silu",)}
_SLIDING = ("rope_theta", "rope_scaling", "sliding_window", "full_attention_layers")
_GEMMA = {
    "zero_centered_gamma": True,
    "embedding_scaled": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_FREE = ("rope_theta", "rope_scaling", "attention_bias", "attention_output_bias")
_GEMMA_LAYERS = ("sliding_window", "full_attention_layers", "full_attention_every")
_GEMMA_REQUIRED = {"use_bidirectional_attention": (False, None)}
_GEMMA_ABSENT = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

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
        fixed={"qk_norm": "head"},
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
    "gemma": Family(
        "gemma",
        "GemmaForCausalLM",
        fixed=_GEMMA,
        free=_GEMMA_FREE,
        # As its first configurations say it, with the approximation meant.
        required={**_GEMMA_REQUIRED, "hidden_act": ("gelu_pytorch_tanh", "gelu")},
        absent={
            **_GEMMA_ABSENT,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        keys=_COMMON | _same("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        fixed={**_GEMMA, "norm_placement": "sandwich"},
        free=(
            *_GEMMA_FREE,
            *_GEMMA_LAYERS,
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        required={**_GEMMA_REQUIRED, "hidden_activation": ("gelu_pytorch_tanh",)},
        absent={
            **_GEMMA_ABSENT,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys=_COMMON | _same("query_pre_attn_scalar", "final_logit_softcapping"),
        fixed={**_GEMMA, "norm_placement": "sandwich", "qk_norm": "head"},
        free=(
            *_GEMMA_FREE,
            *_GEMMA_LAYERS,
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "rope_local_base_freq",
        ),
        required={
            **_GEMMA_REQUIRED,
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
        },
        absent={
            **_GEMMA_ABSENT,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
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
    if family.absent.get("tie_word_embeddings") and not shape.tie_word_embeddings:
        yield "tie_word_embeddings", False, True
    if shape.family == "gpt2":
        if shape.num_key_value_heads != shape.num_attention_heads:
            yield "num_key_value_heads", shape.num_key_value_heads, shape.num_attention_heads
        if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
            yield "head_dim", shape.head_dim, shape.hidden_size // shape.num_attention_heads
