"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, a window in every layer or in none."""

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import GATE_UP, QKV, Fused, TensorNames
from megalite.families.windows import EveryLayer

FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    published="2024-04",
    words=(Rope(scalings=()), EveryLayer()),
    required=SILU,
    dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    absent={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    names=TensorNames(fusions=(Fused("self_attn.qkv_proj", QKV), Fused("mlp.gate_up_proj", GATE_UP))),
    presets={
        "phi-3-mini-4k": sizes(3072, 8192, 32, 32, 32, 4096, vocab_size=32064, sliding_window=2047),
        "phi-3-medium-4k": sizes(5120, 17920, 40, 40, 10, 4096, vocab_size=32064, sliding_window=2047),
        "phi-4": sizes(5120, 17920, 40, 40, 10, 16384, vocab_size=100352, rope_theta=250000.0),
    },
)
