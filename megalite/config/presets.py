"""Model shapes by name: four of our own to try things with, and published ones."""

from difflib import get_close_matches
from typing import Any

from megalite.config.draft import Draft, one_of
from megalite.config.toml import shown

# Sizes by Hugging Face's names, in this order; what follows them is optional.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0}
_LLAMA_31 = {**_LLAMA_3, "rope_type": "llama3", "rope_factor": 8.0}
_LLAMA_32 = {**_LLAMA_3, "rope_type": "llama3", "rope_factor": 32.0, "tie_word_embeddings": True}
_GPT_2 = {"family": "gpt2", "vocab_size": 50257, "tie_word_embeddings": True}
_MISTRAL = {"family": "mistral", "vocab_size": 32000}
_QWEN = {"vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_QWEN_25 = {"family": "qwen2", **_QWEN}
_QWEN_3 = {"family": "qwen3", **_QWEN, "head_dim": 128}
_PHI_3 = {"family": "phi3", "vocab_size": 32064, "sliding_window": 2047}
_PHI_4 = {"family": "phi3", "vocab_size": 100352, "rope_theta": 250000.0}
_TIED = {"tie_word_embeddings": True}
_GEMMA = {"family": "gemma", "vocab_size": 256000, "rms_norm_eps": 1e-6, "head_dim": 256, **_TIED}
_GEMMA_2 = {
    **_GEMMA,
    "family": "gemma2",
    "sliding_window": 4096,
    "full_attention_every": 2,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = {
    **_GEMMA,
    "family": "gemma3_text",
    "vocab_size": 262144,
    "sliding_window": 512,
    "full_attention_every": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}

_SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # With a vocabulary of 16k they have about 3, 17, 98 and 300 million parameters.
    "tiny": ((128, 352, 4, 4, 2, 2048), _TIED),
    "small": ((384, 1024, 6, 6, 6, 2048), _TIED),
    "medium": ((768, 2048, 12, 12, 12, 4096), _TIED),
    "large": ((1024, 2816, 24, 16, 8, 4096), _TIED),
    "gpt2": ((768, 3072, 12, 12, 12, 1024), _GPT_2),
    "gpt2-medium": ((1024, 4096, 24, 16, 16, 1024), _GPT_2),
    "gpt2-large": ((1280, 5120, 36, 20, 20, 1024), _GPT_2),
    "gpt2-xl": ((1600, 6400, 48, 25, 25, 1024), _GPT_2),
    "llama-2-7b": ((4096, 11008, 32, 32, 32, 4096), {"vocab_size": 32000}),
    "llama-2-13b": ((5120, 13824, 40, 40, 40, 4096), {"vocab_size": 32000}),
    "llama-2-70b": ((8192, 28672, 80, 64, 8, 4096), {"vocab_size": 32000}),
    "llama-3-8b": ((4096, 14336, 32, 32, 8, 8192), _LLAMA_3),
    "llama-3-70b": ((8192, 28672, 80, 64, 8, 8192), _LLAMA_3),
    "llama-3.1-8b": ((4096, 14336, 32, 32, 8, 131072), _LLAMA_31),
    "llama-3.1-70b": ((8192, 28672, 80, 64, 8, 131072), _LLAMA_31),
    "llama-3.2-1b": ((2048, 8192, 16, 32, 8, 131072), _LLAMA_32),
    "llama-3.2-3b": ((3072, 8192, 28, 24, 8, 131072), _LLAMA_32),
    "mistral-7b-v0.1": ((4096, 14336, 32, 32, 8, 32768), {**_MISTRAL, "sliding_window": 4096}),
    "mistral-7b-v0.3": (
        (4096, 14336, 32, 32, 8, 32768),
        {**_MISTRAL, "vocab_size": 32768, "rope_theta": 1000000.0},
    ),
    "qwen2.5-0.5b": ((896, 4864, 24, 14, 2, 32768), {**_QWEN_25, **_TIED}),
    "qwen2.5-1.5b": ((1536, 8960, 28, 12, 2, 131072), {**_QWEN_25, **_TIED}),
    "qwen2.5-3b": ((2048, 11008, 36, 16, 2, 32768), {**_QWEN_25, **_TIED}),
    "qwen2.5-7b": ((3584, 18944, 28, 28, 4, 131072), {**_QWEN_25, "vocab_size": 152064}),
    "qwen3-0.6b": ((1024, 3072, 28, 16, 8, 40960), {**_QWEN_3, **_TIED}),
    "qwen3-1.7b": ((2048, 6144, 28, 16, 8, 40960), {**_QWEN_3, **_TIED}),
    "qwen3-4b": ((2560, 9728, 36, 32, 8, 40960), {**_QWEN_3, **_TIED}),
    "qwen3-8b": ((4096, 12288, 36, 32, 8, 40960), _QWEN_3),
    "phi-3-mini-4k": ((3072, 8192, 32, 32, 32, 4096), _PHI_3),
    "phi-3-medium-4k": ((5120, 17920, 40, 40, 10, 4096), _PHI_3),
    "phi-4": ((5120, 17920, 40, 40, 10, 16384), _PHI_4),
    "gemma-2b": ((2048, 16384, 18, 8, 1, 8192), _GEMMA),
    "gemma-7b": ((3072, 24576, 28, 16, 16, 8192), _GEMMA),
    "gemma-2-2b": ((2304, 9216, 26, 8, 4, 8192), _GEMMA_2),
    "gemma-2-9b": ((3584, 14336, 42, 16, 8, 8192), _GEMMA_2),
    "gemma-2-27b": (
        (4608, 36864, 46, 32, 16, 8192),
        {**_GEMMA_2, "head_dim": 128, "query_pre_attn_scalar": 144},
    ),
    "gemma-3-270m": ((640, 2048, 18, 4, 1, 32768), _GEMMA_3),
    "gemma-3-1b": ((1152, 6912, 26, 4, 1, 32768), _GEMMA_3),
    "tinyllama-1.1b": ((2048, 5632, 22, 32, 4, 2048), {"vocab_size": 32000}),
    "smollm2-135m": (
        (576, 1536, 30, 9, 3, 8192),
        {
            "vocab_size": 49152,
            "rope_theta": 100000.0,
            "initializer_range": 0.041666666666666664,
            **_TIED,
        },
    ),
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {"family": "llama", **dict(zip(_SIZES, sizes, strict=True)), **others}
    for name, (sizes, others) in _SHAPES.items()
}


def apply_preset(draft: Draft) -> None:
    """Put the shape of model.preset behind the keys that [model] has; the name itself goes, as it has done its work."""
    name = draft.take_out("model", "preset")
    if name is None:
        return
    if name not in (PRESETS if isinstance(name, str) else ()):
        close = get_close_matches(str(name), PRESETS, n=1)
        remedy = f"did you mean {close[0]}?" if close else one_of(PRESETS)
        draft.problem("model.preset", f"there is no preset {shown(name)}", remedy)
        draft.incomplete.add("model")
        return
    if draft.has("model", "hf_config"):
        draft.problem("model.preset", "stands beside model.hf_config", "name one of the two")
    draft.set_behind("model", PRESETS[name], f"preset {name}", named_by="model.preset")


def require_shape(draft: Draft) -> None:
    """One problem instead of one a key where [model] has nothing of a shape."""
    if isinstance(draft.values.get("model", {}), dict) and not any(draft.has("model", key) for key in _SIZES):
        if "model" not in draft.incomplete:
            remedy = f"set model.preset ({', '.join(PRESETS)}), model.hf_config, or model.hidden_size and the others"
            draft.problem("model", "has no shape", remedy)
        draft.incomplete.add("model")
