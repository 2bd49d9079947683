"""Qwen 1.5 to 2.5 (Yang et al. 2024): biases of query, key and value; a window after the first layers."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import AfterFirst

_QWEN_25 = {"vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    published="2024-02",
    words=(Rope(), AfterFirst()),
    fixed={"attention_bias": True},
    required=SILU,
    absent={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    presets={
        "qwen2.5-0.5b": sizes(896, 4864, 24, 14, 2, 32768, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-1.5b": sizes(1536, 8960, 28, 12, 2, 131072, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-3b": sizes(2048, 11008, 36, 16, 2, 32768, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-7b": sizes(3584, 18944, 28, 28, 4, 131072, **{**_QWEN_25, "vocab_size": 152064}),
    },
)
