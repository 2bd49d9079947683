"""OLMo 2 (OLMo team, "2 OLMo 2 Furious", 2024): norms on each block's output, and of query and key over all heads."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS

_OLMO_2 = {"vocab_size": 100352, "rope_theta": 500000.0, "rms_norm_eps": 1e-6}

FAMILY = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    published="2024-11",
    words=(Rope(), ATTENTION_BIAS),
    fixed={"norm_placement": "output", "qk_norm": "full"},
    required=SILU,
    absent=sizes(4096, 11008, 32, 32, None, 2048, vocab_size=50304, rms_norm_eps=1e-5),
    presets={
        "olmo-2-1b": sizes(2048, 8192, 16, 16, 16, 4096, **_OLMO_2),
        "olmo-2-7b": sizes(4096, 11008, 32, 32, 32, 4096, **_OLMO_2),
        "olmo-2-13b": sizes(5120, 13824, 40, 40, 40, 4096, **_OLMO_2),
        "olmo-2-32b": sizes(5120, 27648, 64, 40, 8, 4096, **_OLMO_2),
    },
)
