"""Ministral 8B (2024): Mistral with a window in the layers that layer_types names."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import LayerTypes

FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    published="2024-10",
    words=(Rope(), LayerTypes()),
    required=SILU,
    absent=sizes(*(4096, 14336, 32, 32, 8, 131072), vocab_size=32000, rms_norm_eps=1e-6, sliding_window=4096),
)
