"""Ministral 8B (2024): Mistral with a window in the layers that layer_types names."""

from megalite.families.family import SILU, Family
from megalite.families.rope import Rope
from megalite.families.windows import LayerTypes

FAMILY = Family(
    "ministral",
    "MinistralForCausalLM",
    published="2024-10",
    words=(Rope(), LayerTypes()),
    required=SILU,
    absent={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
)
