"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window in every layer."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import EveryLayer

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    published="2023-09",
    words=(Rope(), EveryLayer()),
    required=SILU,
    absent=sizes(*(4096, 14336, 32, 32, 8, 131072), vocab_size=32000, rms_norm_eps=1e-6, sliding_window=4096),
    presets={
        "mistral-7b-v0.1": sizes(4096, 14336, 32, 32, 8, 32768, vocab_size=32000, sliding_window=4096),
        "mistral-7b-v0.3": sizes(4096, 14336, 32, 32, 8, 32768, vocab_size=32768, rope_theta=1000000.0),
    },
)
