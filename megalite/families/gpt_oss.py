"""gpt-oss (OpenAI 2025): attention sinks, a window in every other layer, and experts with biases and a clamp."""

from dataclasses import dataclass
from typing import Any

from megalite.families.experts import TOP_K, ExpertCount
from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import TensorNames
from megalite.families.windows import LayerTypes
from megalite.families.words import ATTENTION_BIAS, Config, Shared
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class _EveryOther(LayerTypes):
    """Without layer_types the first layer has the window, the second has none, and so on."""

    def without_layer_types(self, config: Config) -> tuple[int, int]:
        return 0, 2

    def write(self, shape: ModelShape) -> dict[str, Any]:
        # transformers asks for a window though no layer has it.
        return {**super().write(shape), "sliding_window": shape.sliding_window or 128}


_LENGTHS = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GPT_OSS: dict[str, Any] = {
    **{"vocab_size": 201088, "head_dim": 64, "rope_theta": 150000.0, "moe_intermediate_size": 2880},
    **{"num_experts_per_tok": 4, "sliding_window": 128, "full_attention_every": 2},
    **{"rope_type": "yarn", "rope_factor": 32.0, "rope_original_positions": 4096, "rope_truncate": False},
}

FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    published="2025-08",
    keys={key: key for key in SIZES if key != "intermediate_size"} | TOP_K | {"swiglu_limit": "swiglu_limit"},
    words=(
        Rope(),
        _EveryOther(),
        ATTENTION_BIAS,
        Shared("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ExpertCount("num_local_experts", 128),
    ),
    fixed={"attention_sinks": True, "router_bias": True, "expert_bias": True},
    unset={"attention_bias": True, "attention_output_bias": True, "swiglu_limit": 7.0},
    required={**SILU, "swiglu_alpha": (1.702,)},
    absent=sizes(
        *(2880, 2880, 36, 64, 8, 131072),
        vocab_size=201088,
        head_dim=64,
        sliding_window=128,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        attention_bias=True,
        rope_theta=150000.0,
        rope_parameters={"rope_type": "yarn", **_LENGTHS},
    ),
    names=TensorNames(modules={"mlp.gate": "mlp.router"}, interleaved=True),
    presets={
        "gpt-oss-20b": sizes(2880, 2880, 24, 64, 8, 131072, **_GPT_OSS, num_experts=32),
        "gpt-oss-120b": sizes(2880, 2880, 36, 64, 8, 131072, **_GPT_OSS, num_experts=128),
    },
)
