"""Gemma 3's language models (Kamath et al. 2025): Gemma 2 with norms of query and key in place of soft caps, and rotary
frequencies of their own in layers with a window."""

from megalite.families.family import SIZES, Family, sizes
from megalite.families.gemma import CAUSAL, PRESET
from megalite.families.gemma2 import SANDWICH, SANDWICH_ABSENT
from megalite.families.rope import Rope
from megalite.families.windows import ExceptEvery
from megalite.families.words import ATTENTION_BIAS, QueryScale

_GEMMA_3 = {
    **PRESET,
    "vocab_size": 262144,
    "sliding_window": 512,
    "full_attention_every": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}

FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    published="2025-03",
    keys={**SIZES, "final_logit_softcapping": "final_logit_softcapping"},
    words=(Rope(scalings=("linear", "llama3"), local=True), ATTENTION_BIAS, ExceptEvery(), QueryScale()),
    fixed={**SANDWICH, "qk_norm": "head"},
    required={**CAUSAL, "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,)},
    absent={
        **SANDWICH_ABSENT,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    always_tied=True,
    presets={
        "gemma-3-270m": sizes(640, 2048, 18, 4, 1, 32768, **_GEMMA_3),
        "gemma-3-1b": sizes(1152, 6912, 26, 4, 1, 32768, **_GEMMA_3),
    },
)
