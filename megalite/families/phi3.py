"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, a window in every layer or in none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.families.family import ATTENTION_DROPOUT, SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.tensors import GATE_UP, QKV, Fused, TensorNames
from megalite.families.windows import EveryLayer
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class Phi3Rope(Rope):
    """LongRoPE as transformers 4 wants it of Phi-3: three keys, and the lengths whose ratio is its factor beside."""

    scalings: tuple[str, ...] = ("longrope",)

    def rope_type(self, rope: Mapping[str, Any]) -> Any:
        """The first files call LongRoPE "su"; for transformers, Phi-3's "yarn" is LongRoPE too."""
        kind = super().rope_type(rope)
        return "longrope" if kind in ("su", "yarn") else kind

    def write(self, shape: ModelShape) -> dict[str, Any]:
        config = super().write(shape)
        if shape.rope_scaling is not None:
            words = config["rope_scaling"]
            config["rope_scaling"] = {
                "type": "longrope",
                **{name: words[name] for name in ("short_factor", "long_factor")},
            }
        return config

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        yield from super().inexpressible(shape)
        scaling = shape.rope_scaling
        if scaling is None or scaling.rope_type != "longrope":
            return
        ratio = shape.max_position_embeddings / scaling.original_max_position_embeddings
        if scaling.factor != max(ratio, 1.0):
            yield "rope_factor", scaling.factor, max(ratio, 1.0)
        if scaling.attention_factor is not None:
            yield "rope_attention_factor", scaling.attention_factor, None


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    published="2024-04",
    words=(Phi3Rope(partial=True), EveryLayer()),
    required=SILU,
    # transformers reads embd_pdrop nowhere.
    dropouts={**ATTENTION_DROPOUT, "resid_pdrop": ("residual_dropout",)},
    absent=sizes(
        *(3072, 8192, 32, 32, None, 4096),
        vocab_size=32064,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    names=TensorNames(fusions=(Fused("self_attn.qkv_proj", QKV), Fused("mlp.gate_up_proj", GATE_UP))),
    presets={
        "phi-3-mini-4k": sizes(3072, 8192, 32, 32, 32, 4096, vocab_size=32064, sliding_window=2047),
        "phi-3-medium-4k": sizes(5120, 17920, 40, 40, 10, 4096, vocab_size=32064, sliding_window=2047),
        "phi-4": sizes(5120, 17920, 40, 40, 10, 16384, vocab_size=100352, rope_theta=250000.0),
    },
)
