"""Gemma 2 (Riviere et al. 2024): norms around each block, soft caps, a window in every second layer."""

from typing import Any

from megalite.families.family import SIZES, Family, sizes
from megalite.families.gemma import ABSENT, CAUSAL, FIXED, PRESET
from megalite.families.rope import Rope
from megalite.families.windows import ExceptEvery
from megalite.families.words import ATTENTION_BIAS, QueryScale

SANDWICH = {**FIXED, "norm_placement": "sandwich"}
SANDWICH_ABSENT = {
    **ABSENT,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_2: dict[str, Any] = {
    **PRESET,
    "sliding_window": 4096,
    "full_attention_every": 2,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    published="2024-06",
    keys={
        **SIZES,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    words=(Rope(), ATTENTION_BIAS, ExceptEvery(), QueryScale()),
    fixed=SANDWICH,
    required={**CAUSAL, "hidden_activation": ("gelu_pytorch_tanh",)},
    absent={
        **SANDWICH_ABSENT,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    always_tied=True,
    presets={
        "gemma-2-2b": sizes(2304, 9216, 26, 8, 4, 8192, **_GEMMA_2),
        "gemma-2-9b": sizes(3584, 14336, 42, 16, 8, 8192, **_GEMMA_2),
        "gemma-2-27b": sizes(
            *(4608, 36864, 46, 32, 16, 8192), **{**_GEMMA_2, "head_dim": 128, "query_pre_attn_scalar": 144}
        ),
    },
)
