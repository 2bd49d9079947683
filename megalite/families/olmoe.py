"""OLMoE (Muennighoff et al. 2024): many small experts in every layer, whose weights for a token need not sum to 1."""

from megalite.families.experts import NORMALISED, TOP_K, ExpertCount
from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS, Shared

FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    published="2024-09",
    keys={key: key for key in SIZES if key not in ("intermediate_size", "head_dim")} | TOP_K | NORMALISED,
    words=(
        Rope(),
        ATTENTION_BIAS,
        Shared("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ExpertCount("num_experts", 64),
    ),
    fixed={"qk_norm": "full"},
    unset={"norm_topk_prob": False},
    required={**SILU, "clip_qkv": (None,)},
    absent=sizes(2048, 2048, 16, 16, None, 4096, vocab_size=50304, num_experts_per_tok=8),
    presets={
        "olmoe-1b-7b": sizes(
            *(2048, 1024, 16, 16, 16, 4096),
            vocab_size=50304,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=1024,
        )
    },
)
