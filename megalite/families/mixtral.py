"""Mixtral (Jiang et al. 2024, "Mixtral of experts"): Mistral with experts in every layer, each as wide as its MLP."""

from typing import Any

from megalite.families.experts import TOP_K, ExpertCount
from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import TensorNames
from megalite.families.windows import EveryLayer
from megalite.families.words import Shared

_MIXTRAL: dict[str, Any] = {"rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2}

FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    published="2023-12",
    keys={key: key for key in SIZES if key != "intermediate_size"} | TOP_K,
    words=(
        Rope(),
        EveryLayer(),
        Shared("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ExpertCount("num_local_experts", 8),
    ),
    required={**SILU, "router_jitter_noise": (0.0, None)},
    absent=sizes(
        *(4096, 14336, 32, 32, 8, 131072), vocab_size=32000, rope_theta=1000000.0, num_experts_per_tok=2
    ),
    names=TensorNames(
        modules={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
            "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
            "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
        }
    ),
    presets={
        "mixtral-8x7b": sizes(
            *(4096, 14336, 32, 32, 8, 32768), vocab_size=32000, moe_intermediate_size=14336, **_MIXTRAL
        ),
        "mixtral-8x22b": sizes(
            *(6144, 16384, 56, 48, 8, 65536), vocab_size=32768, moe_intermediate_size=16384, **_MIXTRAL
        ),
    },
)
