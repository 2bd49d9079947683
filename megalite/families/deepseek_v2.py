"""DeepSeek-V2, V2-Lite, Coder-V2 (DeepSeek-AI 2024, "DeepSeek-V2"): latent attention, many small and shared experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.deepseek import ABSENT, KEYS, of_experts, stretched, words
from megalite.families.family import SILU, Family, sizes
from megalite.families.words import Config, Plain, quoted
from megalite.topology.experts import MixtureShape
from megalite.topology.shape import ModelShape

_LITE: dict[str, Any] = {
    **{"vocab_size": 102400, "rms_norm_eps": 1e-6},
    **of_experts(64, 6, 1408, shared=2, dense_layers=1),
    **stretched(0.707),
}
_WHOLE: dict[str, Any] = {
    **{"vocab_size": 102400, "rms_norm_eps": 1e-6, "q_lora_rank": 1536},
    **of_experts(160, 6, 1536, shared=2, dense_layers=1),
    **{"n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    **stretched(1.0),
}


@dataclass(frozen=True)
class _Groups(Plain):
    """Groups of experts, which topk_method switches on; a group is as good as the best of its experts."""

    fields: tuple[str, ...] = ("n_group", "topk_group")
    config_keys: tuple[str, ...] = ("topk_method", "n_group", "topk_group")

    def read(self, config: Config) -> dict[str, Any]:
        if config.get("topk_method") != "group_limited_greedy":
            return {}
        return {name: config[name] for name in self.fields if config.get(name) is not None}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        assert isinstance(shape, MixtureShape) and shape.experts is not None
        groups, best = shape.experts.n_group, shape.experts.topk_group
        method = "group_limited_greedy" if groups > 1 else "greedy"
        return {"topk_method": method, "n_group": groups, "topk_group": best}

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        if (method := config.get("topk_method", "greedy")) not in ("greedy", "group_limited_greedy"):
            yield (
                f"has topk_method = {quoted(method)}",
                'only "greedy" or "group_limited_greedy" is supported',
            )


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    published="2024-05",
    keys=KEYS,
    words=(*words(64), _Groups()),
    fixed={"norm_topk_prob": False},
    required={
        **SILU,
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
    },
    absent=sizes(
        *(4096, 11008, 32, 32, None, 2048),
        **ABSENT,
        vocab_size=102400,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    presets={
        "deepseek-v2-lite": sizes(2048, 10944, 27, 16, 16, 163840, **_LITE),
        "deepseek-v2": sizes(5120, 12288, 60, 128, 128, 163840, **_WHOLE),
    },
)
