"""Published config.json files, rewritten from their facts: the keys that each has, and what it gives.

A number is the count of parameters that the model's publishers give (a tied table once); a text is part of the message
of a refusal.
"""

from typing import Any

from tests.support.mixture_configs import CONFIGS

Config = dict[str, Any]


def _decoder(
    model_type: str,
    architecture: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    shared: int,
    vocabulary: int,
    positions: int,
    **more: Any,
) -> Config:
    """A file in the words that Llama and most others have, as transformers 4 writes it."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shared,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": vocabulary,
        **more,
    }


def _llama(*sizes: int, **more: Any) -> Config:
    return _decoder(
        "llama",
        "LlamaForCausalLM",
        *sizes,
        **{"attention_bias": False, "pretraining_tp": 1, "rope_scaling": None, **more},
    )


def _llama3(factor: float) -> Config:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {"rope_scaling": scaling, "rope_theta": 500000.0, "mlp_bias": False, "bos_token_id": 128000}


def _mistral(*sizes: int, **more: Any) -> Config:
    return _decoder("mistral", "MistralForCausalLM", *sizes, **{"sliding_window": None, **more})


def _qwen2(*sizes: int, **more: Any) -> Config:
    layers = sizes[2]
    own = {
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-6,
    }
    return _decoder(
        "qwen2", "Qwen2ForCausalLM", *sizes, **{**own, "rope_theta": 1000000.0, "use_mrope": False, **more}
    )


def _qwen3(*sizes: int, **more: Any) -> Config:
    own = {
        "attention_bias": False,
        "head_dim": 128,
        "max_window_layers": sizes[2],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _decoder("qwen3", "Qwen3ForCausalLM", *sizes, **{**own, **more})


def _gemma(model_type: str, *sizes: int, **more: Any) -> Config:
    architecture = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3"}[model_type]
    # The head is tied by default, and the files do not say it.
    file = _decoder(
        model_type, f"{architecture}ForCausalLM", *sizes, rms_norm_eps=1e-6, pad_token_id=0, head_dim=256
    )
    del file["tie_word_embeddings"]
    file["hidden_act"] = "gelu_pytorch_tanh"
    file["hidden_activation"] = "gelu_pytorch_tanh"
    return {**file, **more}


_GEMMA2: Config = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "cache_implementation": "hybrid",
}
_GEMMA2_27B = {**_GEMMA2, "head_dim": 128, "query_pre_attn_scalar": 144}
_GEMMA3: Config = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304, **more: Any) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": vocabulary,
        **more,
    }


def _phi(hidden: int, layers: int, partial: float) -> Config:
    return {
        "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "embd_pdrop": 0.0,
        "eos_token_id": None,
        "hidden_act": "gelu_new",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "phi",
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": None,
        "partial_rotary_factor": partial,
        "qk_layernorm": False,
        "resid_pdrop": 0.0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 51200,
    }


def _phi3(*sizes: int, **more: Any) -> Config:
    own = {
        "auto_map": {
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "rope_scaling": None,
        "sliding_window": 2047,
    }
    return _decoder("phi3", "Phi3ForCausalLM", *sizes, **{**own, **more})


def _starcoder2(*sizes: int, **more: Any) -> Config:
    own = {
        "embedding_dropout": 0.1,
        "residual_dropout": 0.1,
        "attention_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "sliding_window": 4096,
        "use_bias": True,
    }
    file = _decoder("starcoder2", "Starcoder2ForCausalLM", *sizes, **{**own, **more})
    del file["tie_word_embeddings"], file["rms_norm_eps"]
    return file | ({"tie_word_embeddings": False} if sizes[0] == 6144 else {})


def _olmo2(*sizes: int) -> Config:
    own = {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None}
    return _decoder("olmo2", "Olmo2ForCausalLM", *sizes, **own)


def _granite(*sizes: int, scaling: float, attention: float) -> Config:
    return _decoder(
        *("granite", "GraniteForCausalLM"),
        *sizes,
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=attention,
        embedding_multiplier=12.0,
        logits_scaling=scaling,
        mlp_bias=False,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
    )


_LONG = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}}
_SMOLLM3 = _decoder(
    *("smollm3", "SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, 65536),
    attention_bias=False,
    layer_types=["full_attention"] * 36,
    max_window_layers=28,
    mlp_bias=False,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)


def _other(model_type: str) -> tuple[Config, str]:
    return {"model_type": model_type, "hidden_size": 4096}, f'is of model_type "{model_type}"'


_TIED = {"tie_word_embeddings": True}
_MIXTURES = {
    "Mixtral 8x7B": 46_702_792_704,
    "Mixtral 8x22B": 140_630_071_296,
    "Qwen3 30B-A3B": 30_532_122_624,
    "Qwen3 235B-A22B": 235_093_634_560,
    "OLMoE 1B-7B": 6_919_161_856,
    "Granite 3.0 1B-A400M": 1_334_628_352,
    "Granite 3.0 3B-A800M": 3_298_793_472,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V3": 671_026_419_200,
    "Moonlight 16B-A3B": 15_960_110_208,
    "gpt-oss 20b": 20_914_757_184,
    "gpt-oss 120b": 116_829_156_672,
}

PUBLISHED: dict[str, tuple[Config, int | str]] = {
    "Llama 2 7B": (_llama(4096, 11008, 32, 32, 32, 32000, 4096), 6_738_415_616),
    "Llama 2 13B": (_llama(5120, 13824, 40, 40, 40, 32000, 4096), 13_015_864_320),
    "Llama 2 70B": (_llama(8192, 28672, 80, 64, 8, 32000, 4096), 68_976_648_192),
    "CodeLlama 7B": (_llama(4096, 11008, 32, 32, 32, 32016, 16384, rope_theta=1000000), 6_738_546_688),
    "Llama 3 8B": (_llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=500000.0), 8_030_261_248),
    "Llama 3 70B": (_llama(8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=500000.0), 70_553_706_496),
    "Llama 3.1 8B": (_llama(4096, 14336, 32, 32, 8, 128256, 131072, **_llama3(8.0)), 8_030_261_248),
    "Llama 3.1 405B": (_llama(16384, 53248, 126, 128, 8, 128256, 131072, **_llama3(8.0)), 405_853_388_800),
    "Llama 3.2 1B": (
        _llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_llama3(32.0), **_TIED),
        1_235_814_400,
    ),
    "Llama 3.2 3B": (
        _llama(3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **_llama3(32.0), **_TIED),
        3_212_749_824,
    ),
    "TinyLlama 1.1B": (_llama(2048, 5632, 22, 32, 4, 32000, 2048), 1_100_048_384),
    "SmolLM2 135M": (_llama(576, 1536, 30, 9, 3, 49152, 8192, rope_theta=100000, **_TIED), 134_515_008),
    "SmolLM2 360M": (_llama(960, 2560, 32, 15, 5, 49152, 8192, rope_theta=100000, **_TIED), 361_821_120),
    "SmolLM2 1.7B": (_llama(2048, 8192, 24, 32, 32, 49152, 8192, rope_theta=130000, **_TIED), 1_711_376_384),
    "Yi 6B": (_llama(4096, 11008, 32, 32, 4, 64000, 4096, rope_theta=5000000.0), 6_061_035_520),
    "DeepSeek LLM 7B": (_llama(4096, 11008, 30, 32, 32, 102400, 4096, rms_norm_eps=1e-6), 6_910_365_696),
    "DeepSeek Coder 1.3B": (
        _llama(
            2048,
            5504,
            24,
            16,
            16,
            32256,
            16384,
            rope_theta=100000,
            rope_scaling={"factor": 4.0, "type": "linear"},
        ),
        1_346_471_936,
    ),
    "Mistral 7B v0.1": (_mistral(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096), 7_241_732_096),
    "Mistral 7B v0.3": (_mistral(4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1000000.0), 7_248_023_552),
    "Mistral Nemo 12B": (_mistral(5120, 14336, 40, 32, 8, 131072, 131072, head_dim=128), 12_247_782_400),
    "Mistral Small 24B": (_mistral(5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128), 23_572_403_200),
    "Codestral 22B": (_mistral(6144, 16384, 56, 48, 8, 32768, 32768, rope_theta=1000000.0), 22_247_282_688),
    "Qwen2.5 0.5B": (_qwen2(896, 4864, 24, 14, 2, 151936, 32768, **_TIED), 494_032_768),
    "Qwen2.5 1.5B": (_qwen2(1536, 8960, 28, 12, 2, 151936, 131072, **_TIED), 1_543_714_304),
    "Qwen2.5 3B": (_qwen2(2048, 11008, 36, 16, 2, 151936, 32768, **_TIED), 3_085_938_688),
    "Qwen2.5 7B": (_qwen2(3584, 18944, 28, 28, 4, 152064, 131072), 7_615_616_512),
    "Qwen2.5 14B": (_qwen2(5120, 13824, 48, 40, 8, 152064, 131072, rms_norm_eps=1e-5), 14_770_033_664),
    "Qwen2.5 32B": (_qwen2(5120, 27648, 64, 40, 8, 152064, 131072, rms_norm_eps=1e-5), 32_763_876_352),
    "Qwen2.5 72B": (_qwen2(8192, 29568, 80, 64, 8, 152064, 131072, rms_norm_eps=1e-5), 72_706_203_648),
    "DeepSeek R1 Distill Qwen 1.5B": (
        _qwen2(1536, 8960, 28, 12, 2, 151936, 131072, rope_theta=10000),
        1_777_088_000,
    ),
    "Qwen3 0.6B": (_qwen3(1024, 3072, 28, 16, 8, 151936, 40960, **_TIED), 596_049_920),
    "Qwen3 1.7B": (_qwen3(2048, 6144, 28, 16, 8, 151936, 40960, **_TIED), 1_720_574_976),
    "Qwen3 4B": (_qwen3(2560, 9728, 36, 32, 8, 151936, 40960, **_TIED), 4_022_468_096),
    "Qwen3 8B": (_qwen3(4096, 12288, 36, 32, 8, 151936, 40960), 8_190_735_360),
    "Qwen3 14B": (_qwen3(5120, 17408, 40, 40, 8, 151936, 40960), 14_768_307_200),
    "Qwen3 32B": (_qwen3(5120, 25600, 64, 64, 8, 151936, 40960), 32_762_123_264),
    "Gemma 2B": (_gemma("gemma", 2048, 16384, 18, 8, 1, 256000, 8192, hidden_act="gelu"), 2_506_172_416),
    "Gemma 7B": (_gemma("gemma", 3072, 24576, 28, 16, 16, 256000, 8192), 8_537_680_896),
    "Gemma 2 2B": (_gemma("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, **_GEMMA2), 2_614_341_888),
    "Gemma 2 9B": (_gemma("gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, **_GEMMA2), 9_241_705_984),
    "Gemma 2 27B": (
        _gemma(
            "gemma2",
            4608,
            36864,
            46,
            32,
            16,
            256000,
            8192,
            **_GEMMA2_27B,
        ),
        27_227_128_320,
    ),
    "Gemma 3 270M": (_gemma("gemma3_text", 640, 2048, 18, 4, 1, 262144, 32768, **_GEMMA3), 268_098_176),
    "Gemma 3 1B": (_gemma("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, **_GEMMA3), 999_885_952),
    "GPT-2": (_gpt2(768, 12, 12), 124_439_808),
    "DistilGPT-2": (_gpt2(768, 6, 12), 81_912_576),
    "GPT-2 medium": (_gpt2(1024, 24, 16), 354_823_168),
    "GPT-2 large": (_gpt2(1280, 36, 20), 774_030_080),
    "GPT-2 XL": (_gpt2(1600, 48, 25), 1_557_611_200),
    "Pythia 70M": (_neox(512, 6, 8), 70_426_624),
    "Pythia 160M": (_neox(768, 12, 12), 162_322_944),
    "Pythia 410M": (_neox(1024, 24, 16), 405_334_016),
    "Pythia 1B": (_neox(2048, 16, 8), 1_011_781_632),
    "Pythia 1.4B": (_neox(2048, 24, 16), 1_414_647_808),
    "Pythia 2.8B": (_neox(2560, 32, 32), 2_775_208_960),
    "Pythia 6.9B": (_neox(4096, 32, 32, 50432), 6_857_302_016),
    "Pythia 12B": (_neox(5120, 36, 40, 50688), 11_846_072_320),
    "GPT-NeoX 20B": (
        _neox(6144, 44, 64, 50432, hidden_act="gelu_fast", attention_dropout=0, hidden_dropout=0),
        20_554_567_680,
    ),
    "Phi-1.5": (_phi(2048, 24, 0.5), 1_418_270_720),
    "Phi-2": (_phi(2560, 32, 0.4), 2_779_683_840),
    "Phi-3 mini 4k": (_phi3(3072, 8192, 32, 32, 32, 32064, 4096), 3_821_079_552),
    "Phi-3 mini 128k": (
        _phi3(3072, 8192, 32, 32, 32, 32064, 131072, sliding_window=262144, **_LONG),
        3_821_079_552,
    ),
    "Phi-3 medium 4k": (_phi3(5120, 17920, 40, 40, 10, 32064, 4096), 13_960_238_080),
    "Phi-4": (
        _phi3(
            5120,
            17920,
            40,
            40,
            10,
            100352,
            16384,
            sliding_window=None,
            original_max_position_embeddings=16384,
        ),
        14_659_507_200,
    ),
    "Phi-4 mini": (
        _phi3(3072, 8192, 32, 24, 8, 200064, 131072, partial_rotary_factor=0.75, **_TIED, **_LONG),
        3_836_021_760,
    ),
    "a Llama that rotates a part of each head": (
        _llama(3072, 8192, 32, 24, 8, 200064, 131072, partial_rotary_factor=0.75),
        "rotates a part of each head; only whole heads are supported",
    ),
    "StarCoder 2 3B": (
        _starcoder2(3072, 12288, 30, 24, 2, 49152, 16384, rope_theta=999999.4420358813),
        3_030_371_328,
    ),
    "StarCoder 2 7B": (_starcoder2(4608, 18432, 32, 36, 4, 49152, 16384, rope_theta=1000000), 7_173_923_840),
    "StarCoder 2 15B": (_starcoder2(6144, 24576, 40, 48, 4, 49152, 16384, rope_theta=100000), 15_957_889_024),
    "OLMo 2 1B": (_olmo2(2048, 8192, 16, 16, 16, 100352, 4096), 1_484_916_736),
    "OLMo 2 7B": (_olmo2(4096, 11008, 32, 32, 32, 100352, 4096), 7_298_617_344),
    "OLMo 2 13B": (_olmo2(5120, 13824, 40, 40, 40, 100352, 4096), 13_716_198_400),
    "Granite 3.0 2B": (
        _granite(2048, 8192, 40, 32, 8, 49155, 4096, scaling=8.0, attention=0.015625),
        2_533_531_648,
    ),
    "SmolLM 3 3B": (_SMOLLM3, 3_075_098_624),
    "Llama 3 8B, AWQ": (
        _llama(4096, 14336, 32, 32, 8, 128256, 8192, quantization_config={"bits": 4, "quant_method": "awq"}),
        "has a quantization_config; use the weights from before",
    ),
    "Llama with another activation": (
        _llama(2048, 5632, 22, 32, 4, 32000, 2048, hidden_act="relu"),
        'has hidden_act = "relu"; only "silu" is supported',
    ),
    "Gemma 3 4B": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}},
        "it reads images too, which is not supported",
    ),
    **{name: (CONFIGS[name], number) for name, number in _MIXTURES.items()},
    "OLMoE with clipped queries": (
        CONFIGS["OLMoE 1B-7B"] | {"clip_qkv": 8.0},
        "has clip_qkv = 8.0; only null is supported",
    ),
    "Qwen1.5-MoE A2.7B": _other("qwen2_moe"),
    "DeepSeek-V3.2": _other("deepseek_v32"),
    "Falcon 7B": _other("falcon"),
    "OPT 6.7B": _other("opt"),
}
