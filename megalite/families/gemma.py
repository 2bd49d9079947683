"""Gemma (Mesnard et al. 2024): norms by 1 + weight, a scaled embedding, a gated GELU."""

from megalite.families.family import Family, sizes
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS

FIXED = {"zero_centered_gamma": True, "embedding_scaled": True, "hidden_act": "gelu_pytorch_tanh"}
CAUSAL = {"use_bidirectional_attention": (False, None)}
ABSENT = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
PRESET = {"vocab_size": 256000, "rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}

FAMILY = Family(
    "gemma",
    "GemmaForCausalLM",
    published="2024-02",
    words=(Rope(), ATTENTION_BIAS),
    fixed=FIXED,
    # "gelu" stands in the first configurations, with the approximation meant.
    required={**CAUSAL, "hidden_act": ("gelu_pytorch_tanh", "gelu")},
    absent={
        **ABSENT,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    always_tied=True,
    presets={
        "gemma-2b": sizes(2048, 16384, 18, 8, 1, 8192, **PRESET),
        "gemma-7b": sizes(3072, 24576, 28, 16, 16, 8192, **PRESET),
    },
)
