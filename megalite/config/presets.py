"""Model shapes by name: four of our own to try things with, and published ones of the Llama family."""

from typing import Any

from megalite.config.draft import Draft, did_you_mean, one_of
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

_SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # With a vocabulary of 16k they have about 3, 17, 98 and 300 million parameters.
    "tiny": ((128, 352, 4, 4, 2, 2048), {"tie_word_embeddings": True}),
    "small": ((384, 1024, 6, 6, 6, 2048), {"tie_word_embeddings": True}),
    "medium": ((768, 2048, 12, 12, 12, 4096), {"tie_word_embeddings": True}),
    "large": ((1024, 2816, 24, 16, 8, 4096), {"tie_word_embeddings": True}),
    "llama-2-7b": ((4096, 11008, 32, 32, 32, 4096), {"vocab_size": 32000}),
    "llama-2-13b": ((5120, 13824, 40, 40, 40, 4096), {"vocab_size": 32000}),
    "llama-2-70b": ((8192, 28672, 80, 64, 8, 4096), {"vocab_size": 32000}),
    "llama-3-8b": ((4096, 14336, 32, 32, 8, 8192), {"vocab_size": 128256, "rope_theta": 500000.0}),
    "llama-3-70b": ((8192, 28672, 80, 64, 8, 8192), {"vocab_size": 128256, "rope_theta": 500000.0}),
    "tinyllama-1.1b": ((2048, 5632, 22, 32, 4, 2048), {"vocab_size": 32000}),
    "smollm2-135m": (
        (576, 1536, 30, 9, 3, 8192),
        {
            "vocab_size": 49152,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.041666666666666664,
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
        remedy = did_you_mean(str(name), PRESETS) or one_of(PRESETS)
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
