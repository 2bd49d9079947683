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
    absent=sizes(
        *(4096, 22016, 32, 32, 32, 32768), vocab_size=151936, rms_norm_eps=1e-6, sliding_window=4096
    ),
    presets={
        "qwen2.5-0.5b": sizes(896, 4864, 24, 14, 2, 32768, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-1.5b": sizes(1536, 8960, 28, 12, 2, 131072, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-3b": sizes(2048, 11008, 36, 16, 2, 32768, **_QWEN_25, tie_word_embeddings=True),
        "qwen2.5-7b": sizes(3584, 18944, 28, 28, 4, 131072, **{**_QWEN_25, "vocab_size": 152064}),
    },
)
