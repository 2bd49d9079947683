"""DeepSeek-V3, R1 (DeepSeek-AI 2024, "DeepSeek-V3"), Moonlight: V2 with sigmoids of experts, and biases for balance."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.deepseek import ABSENT, KEYS, of_experts, stretched, words
from megalite.families.experts import NORMALISED
from megalite.families.family import SILU, Family, sizes
from megalite.families.tensors import TensorNames
from megalite.families.words import Config, Plain
from megalite.topology.shape import ModelShape

_V3: dict[str, Any] = {
    **{"vocab_size": 129280, "rms_norm_eps": 1e-6, "q_lora_rank": 1536},
    **of_experts(256, 8, 2048, shared=1, dense_layers=3),
    **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    **stretched(1.0),
}
_MOONLIGHT: dict[str, Any] = {
    **{"vocab_size": 163840, "rope_theta": 50000.0, "routed_scaling_factor": 2.446},
    **of_experts(64, 6, 1408, shared=2, dense_layers=1),
}


@dataclass(frozen=True)
class _FurtherTokens(Plain):
    """Layers behind the last that predict further tokens; transformers' model has none either."""

    fields: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")

    def read(self, config: Config) -> dict[str, Any]:
        return {}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}

    def ignored(self, config: Config) -> Iterator[str]:
        # transformers writes its default of 1 as num_mtp_layers, also for files without such a layer.
        if number := config.get("num_nextn_predict_layers"):
            first = config.get("num_hidden_layers")
            yield f"num_nextn_predict_layers = {number} (layers from {first} on, which predict further tokens)"


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    published="2024-12",
    keys=KEYS | NORMALISED | {"n_group": "n_group", "topk_group": "topk_group"},
    words=(*words(256), _FurtherTokens()),
    fixed={"router_scores": "sigmoid", "router_correction_bias": True},
    required={
        **SILU,
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    absent=sizes(
        *(7168, 18432, 61, 128, None, 4096),
        **ABSENT,
        vocab_size=129280,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        n_group=8,
        topk_group=4,
    ),
    names=TensorNames(further="eh_proj.weight"),
    presets={
        "deepseek-v3": sizes(7168, 18432, 61, 128, 128, 163840, **_V3),
        "moonlight-16b-a3b": sizes(2048, 11264, 27, 16, 16, 8192, **_MOONLIGHT),
    },
)
