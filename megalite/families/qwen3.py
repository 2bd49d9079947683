"""Qwen 3 (Yang et al. 2025): RMSNorm of query and key over each head; a window after the first layers."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import AfterFirst
from megalite.families.words import ATTENTION_BIAS

_QWEN_3 = {"vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "head_dim": 128}

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    published="2025-04",
    words=(Rope(), AfterFirst(), ATTENTION_BIAS),
    fixed={"qk_norm": "head"},
    required=SILU,
    absent=sizes(
        *(4096, 22016, 32, 32, 32, 32768),
        vocab_size=151936,
        head_dim=128,
        rms_norm_eps=1e-6,
        sliding_window=4096,
    ),
    presets={
        "qwen3-0.6b": sizes(1024, 3072, 28, 16, 8, 40960, **_QWEN_3, tie_word_embeddings=True),
        "qwen3-1.7b": sizes(2048, 6144, 28, 16, 8, 40960, **_QWEN_3, tie_word_embeddings=True),
        "qwen3-4b": sizes(2560, 9728, 36, 32, 8, 40960, **_QWEN_3, tie_word_embeddings=True),
        "qwen3-8b": sizes(4096, 12288, 36, 32, 8, 40960, **_QWEN_3),
    },
)
