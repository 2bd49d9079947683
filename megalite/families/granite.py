"""Granite 3 and PowerLM (Shen et al., "Power Scheduler", 2024): Llama with factors at four places."""

from dataclasses import dataclass
from typing import Any

from megalite.families.family import SILU, SIZES, Family, sizes
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS, MLP_BIAS, Config, Plain
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class AttentionMultiplier(Plain):
    """The factor of the attention scores, written as head_dim ** -0.5 where the shape has none."""

    fields: tuple[str, ...] = ("attention_multiplier",)
    config_keys: tuple[str, ...] = ("attention_multiplier",)

    def read(self, config: Config) -> dict[str, Any]:
        value = config.get("attention_multiplier")
        return {} if value is None else {"attention_multiplier": value}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        multiplier = shape.attention_multiplier
        return {"attention_multiplier": shape.head_dim**-0.5 if multiplier is None else multiplier}


MULTIPLIERS = {name: name for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")}
_GRANITE_3: dict[str, Any] = {
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    published="2024-08",
    keys={**SIZES, **MULTIPLIERS},
    words=(Rope(), AttentionMultiplier(), ATTENTION_BIAS, MLP_BIAS),
    required=SILU,
    absent=sizes(
        *(4096, 11008, 32, 32, None, 2048), vocab_size=32000, rms_norm_eps=1e-6, attention_multiplier=1.0
    ),
    presets={
        "granite-3.0-2b": sizes(
            *(2048, 8192, 40, 32, 8, 4096), **_GRANITE_3, logits_scaling=8.0, attention_multiplier=0.015625
        ),
        "granite-3.0-8b": sizes(
            *(4096, 12800, 40, 32, 8, 4096), **_GRANITE_3, logits_scaling=16.0, attention_multiplier=0.0078125
        ),
    },
)
