"""The config.json files of published mixtures of experts, rewritten from their facts, with their publishers' counts.

counts: billions of parameters in all and active, as the model cards and reports round them. The active ones leave out
what each publisher leaves out; the tests hold only those that count every table.
"""

from collections.abc import Sequence
from typing import Any

from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import as_settings
from megalite.families.registry import FAMILIES
from megalite.planner.mixture_config import mixture_shape
from megalite.topology.experts import MixtureShape

Config = dict[str, Any]


def _mixture(model_type: str, sizes: Sequence[int], vocabulary: int, positions: int, **own: Any) -> Config:
    """sizes: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads."""
    hidden, intermediate, layers, heads, shared = sizes
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **own,
    }


def _mixtral(*sizes: int, vocabulary: int, positions: int) -> Config:
    return _mixture(
        "mixtral",
        sizes,
        vocabulary,
        positions,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    )


def _qwen3(*sizes: int, width: int) -> Config:
    return _mixture(
        "qwen3_moe",
        sizes,
        151936,
        40960,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=sizes[2],
    )


def _deepseek(model_type: str, *sizes: int, vocabulary: int, **own: Any) -> Config:
    v3 = model_type == "deepseek_v3"
    return _mixture(
        model_type,
        sizes,
        vocabulary,
        **{"positions": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": _yarn(1.0)} | own,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attention_bias=False,
        moe_layer_freq=1,
        norm_topk_prob=v3,
        scoring_func="sigmoid" if v3 else "softmax",
    )


def _yarn(scale: float) -> Config:
    original = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    return {"type": "yarn", "factor": 40, "mscale": scale, "mscale_all_dim": scale, **original}


def _gpt_oss(layers: int, experts: int) -> Config:
    return _mixture(
        "gpt_oss",
        (2880, 2880, layers, 64, 8),
        201088,
        131072,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        experts_per_token=4,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )


def _granite(*sizes: int, experts: int) -> Config:
    return _mixture(
        "granitemoe",
        sizes,
        49155,
        4096,
        num_local_experts=experts,
        num_experts_per_tok=8,
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        output_router_logits=False,
        router_aux_loss_coef=0.0,
        **{"tie_word_embeddings": True},
    )


CONFIGS: dict[str, Config] = {
    "Mixtral 8x7B": _mixtral(4096, 14336, 32, 32, 8, vocabulary=32000, positions=32768),
    "Mixtral 8x22B": _mixtral(6144, 16384, 56, 48, 8, vocabulary=32768, positions=65536),
    "Qwen3 30B-A3B": _qwen3(2048, 6144, 48, 32, 4, width=768),
    "Qwen3 235B-A22B": _qwen3(4096, 12288, 94, 64, 4, width=1536),
    "Qwen1.5-MoE A2.7B": _mixture(
        "qwen2_moe",
        (2048, 5632, 24, 16, 16),
        151936,
        8192,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        use_sliding_window=False,
        sliding_window=32768,
        max_window_layers=21,
    ),
    "Qwen2 57B-A14B": _mixture(
        "qwen2_moe",
        (3584, 18944, 28, 28, 4),
        151936,
        32768,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        use_sliding_window=False,
        sliding_window=65536,
        max_window_layers=28,
    ),
    "OLMoE 1B-7B": _mixture(
        "olmoe",
        (2048, 1024, 16, 16, 16),
        50304,
        4096,
        num_experts=64,
        num_experts_per_tok=8,
        attention_bias=False,
        clip_qkv=None,
        norm_topk_prob=False,
    ),
    "DeepSeek-V2-Lite": _deepseek(
        "deepseek_v2",
        *(2048, 10944, 27, 16, 16),
        vocabulary=102400,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        rope_scaling=_yarn(0.707),
    ),
    "DeepSeek-V2": _deepseek(
        "deepseek_v2",
        *(5120, 12288, 60, 128, 128),
        vocabulary=102400,
        q_lora_rank=1536,
        first_k_dense_replace=1,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        **{"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        routed_scaling_factor=16.0,
    ),
    "DeepSeek-V3": _deepseek(
        "deepseek_v3",
        *(7168, 18432, 61, 128, 128),
        vocabulary=129280,
        q_lora_rank=1536,
        first_k_dense_replace=3,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        **{"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        num_nextn_predict_layers=1,
    ),
    "Moonlight 16B-A3B": _deepseek(
        "deepseek_v3",
        *(2048, 11264, 27, 16, 16),
        vocabulary=163840,
        **{"positions": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": None},
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        **{"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
        num_nextn_predict_layers=0,
    ),
    "gpt-oss 20b": _gpt_oss(24, 32),
    "gpt-oss 120b": _gpt_oss(36, 128),
    "Granite 3.0 1B-A400M": _granite(1024, 512, 24, 16, 8, experts=32),
    "Granite 3.0 3B-A800M": _granite(1536, 512, 32, 24, 8, experts=40),
    "Phi-3.5-MoE": _mixture(
        "phimoe",
        (4096, 6400, 32, 32, 8),
        32064,
        131072,
        num_local_experts=16,
        num_experts_per_tok=2,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=131072,
    ),
}


def shape_of(config: Config) -> MixtureShape:
    """Return the shape of a mixture, which `megalite train` knows or the planner alone."""
    family = FAMILIES.get(config["model_type"])
    if family is None:
        return mixture_shape(config)
    settings = as_settings(family.read_config(config))
    shape = ModelConfig(family=family.model_type, **settings).shape(0)
    assert isinstance(shape, MixtureShape), settings
    return shape
