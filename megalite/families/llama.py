"""Llama 1 to 3 (Touvron et al. 2023, Dubey et al. 2024), TinyLlama, SmolLM 2."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS, MLP_BIAS

_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0}
_LLAMA_31 = {**_LLAMA_3, "rope_type": "llama3", "rope_factor": 8.0}
_LLAMA_32 = {**_LLAMA_3, "rope_type": "llama3", "rope_factor": 32.0, "tie_word_embeddings": True}

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    published="2023-02",
    words=(Rope(), ATTENTION_BIAS, MLP_BIAS),
    required=SILU,
    absent=sizes(4096, 11008, 32, 32, None, 2048, vocab_size=32000, rms_norm_eps=1e-6),
    presets={
        "llama-2-7b": sizes(4096, 11008, 32, 32, 32, 4096, vocab_size=32000),
        "llama-2-13b": sizes(5120, 13824, 40, 40, 40, 4096, vocab_size=32000),
        "llama-2-70b": sizes(8192, 28672, 80, 64, 8, 4096, vocab_size=32000),
        "llama-3-8b": sizes(4096, 14336, 32, 32, 8, 8192, **_LLAMA_3),
        "llama-3-70b": sizes(8192, 28672, 80, 64, 8, 8192, **_LLAMA_3),
        "llama-3.1-8b": sizes(4096, 14336, 32, 32, 8, 131072, **_LLAMA_31),
        "llama-3.1-70b": sizes(8192, 28672, 80, 64, 8, 131072, **_LLAMA_31),
        "llama-3.1-405b": sizes(16384, 53248, 126, 128, 8, 131072, **_LLAMA_31),
        "llama-3.2-1b": sizes(2048, 8192, 16, 32, 8, 131072, **_LLAMA_32),
        "llama-3.2-3b": sizes(3072, 8192, 28, 24, 8, 131072, **_LLAMA_32),
        "tinyllama-1.1b": sizes(2048, 5632, 22, 32, 4, 2048, vocab_size=32000),
        "smollm2-135m": sizes(
            *(576, 1536, 30, 9, 3, 8192),
            vocab_size=49152,
            rope_theta=100000.0,
            initializer_range=0.041666666666666664,
            tie_word_embeddings=True,
        ),
    },
)
