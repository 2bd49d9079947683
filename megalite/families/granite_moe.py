"""Granite 3's mixtures and PowerMoE (Shen et al., "Power Scheduler", 2024): Granite with experts in every layer."""

from typing import Any

from megalite.families.experts import TOP_K, ExpertCount
from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.granite import MULTIPLIERS, AttentionMultiplier
from megalite.families.rope import Rope
from megalite.families.tensors import TensorNames
from megalite.families.words import ATTENTION_BIAS, Shared

_COUNT = "num_local_experts"
_GRANITE_3: dict[str, Any] = {
    "vocab_size": 49155,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "attention_multiplier": 0.015625,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}
_1B, _3B = (1024, 512, 24, 16, 8), (1536, 512, 32, 24, 8)

FAMILY = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    published="2024-08",
    keys={key: key for key in SIZES if key != "intermediate_size"} | MULTIPLIERS | TOP_K,
    words=(
        Rope(),
        AttentionMultiplier(),
        ATTENTION_BIAS,
        Shared("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ExpertCount(_COUNT, 8, config_keys=(_COUNT,)),
    ),
    required=SILU,
    absent=sizes(
        *(4096, 11008, 32, 32, None, 2048),
        vocab_size=32000,
        rms_norm_eps=1e-6,
        attention_multiplier=1.0,
        num_experts_per_tok=2,
    ),
    names=TensorNames(
        modules={
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        },
        in_mixtures={
            "mlp.gate": "block_sparse_moe.router",
            "mlp.experts.gate_up_proj": "block_sparse_moe.experts.gate_up_proj",
            "mlp.experts.down_proj": "block_sparse_moe.experts.down_proj",
        },
    ),
    presets={
        "granite-3.0-1b-a400m": sizes(*_1B, 4096, **_GRANITE_3, num_experts=32),
        "granite-3.0-3b-a800m": sizes(*_3B, 4096, **_GRANITE_3, num_experts=40),
        "granite-3.1-1b-a400m": sizes(*_1B, 131072, **_GRANITE_3, num_experts=32, rope_theta=1500000.0),
    },
)
