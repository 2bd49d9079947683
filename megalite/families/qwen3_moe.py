"""Qwen 3's mixtures (Yang et al. 2025): Qwen 3 with experts in all layers, or in some of them."""

from dataclasses import dataclass
from typing import Any

from megalite.families.experts import NORMALISED, TOP_K, ExpertCount
from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import EveryLayer
from megalite.families.words import ATTENTION_BIAS, Config
from megalite.topology.shape import ModelShape

_PLACES = ("moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step")
_QWEN_3 = {
    **{"vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}


@dataclass(frozen=True)
class _SwitchedWindow(EveryLayer):
    """A window in every layer, where use_sliding_window is set at all."""

    config_keys: tuple[str, ...] = ("sliding_window", "use_sliding_window")

    def read(self, config: Config) -> dict[str, Any]:
        return super().read(config) if config.get("use_sliding_window") else {}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {**super().write(shape), "use_sliding_window": shape.sliding_window is not None}


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    published="2025-04",
    keys={**SIZES, **TOP_K, **NORMALISED, **{name: name for name in _PLACES}},
    words=(Rope(), _SwitchedWindow(), ATTENTION_BIAS, ExpertCount("num_experts", 128)),
    fixed={"qk_norm": "head"},
    unset={"norm_topk_prob": True},
    required=SILU,
    absent=sizes(
        *(2048, 6144, 24, 32, 4, 32768),
        vocab_size=151936,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    presets={
        "qwen3-30b-a3b": sizes(2048, 6144, 48, 32, 4, 40960, **_QWEN_3, moe_intermediate_size=768),
        "qwen3-235b-a22b": sizes(4096, 12288, 94, 64, 4, 40960, **_QWEN_3, moe_intermediate_size=1536),
    },
)
