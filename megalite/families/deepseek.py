"""What DeepSeek's families share: words of config.json about latent attention and shared experts, and their sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.experts import TOP_K, ExpertCount
from megalite.families.family import SIZES
from megalite.families.fields import shape_fields
from megalite.families.rope import Rope
from megalite.families.words import ATTENTION_BIAS, Config, Plain, Words
from megalite.topology.shape import ModelShape

_OWN = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "routed_scaling_factor", "first_k_dense_replace"),
)
KEYS = {key: key for key in (*SIZES, *_OWN) if key not in ("num_key_value_heads", "head_dim")} | TOP_K
ABSENT: dict[str, Any] = {
    **{"rms_norm_eps": 1e-6, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
"""The values that transformers takes for keys that config.json lacks."""
_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class LatentHeads(Plain):
    """The keys that follow from the others: each query head has a key, in a part of its own and a shared one.

    transformers writes the width of the rotated part as head_dim.
    """

    fields: tuple[str, ...] = ("head_dim",)
    config_keys: tuple[str, ...] = ("head_dim", "qk_head_dim", "num_key_value_heads")

    def read(self, config: Config) -> dict[str, Any]:
        return {}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"num_key_value_heads": shape.num_attention_heads}

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        heads, shared = (config.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
        # More is transformers' default of 128 in the file of a smaller model.
        if isinstance(heads, int) and isinstance(shared, int) and shared < heads:
            yield f"has num_key_value_heads = {shared}", f"only num_attention_heads, {heads}, is supported"

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        if shape_fields(shape)["kv_lora_rank"] is None:
            yield "kv_lora_rank", None, 512


@dataclass(frozen=True)
class SharedExperts(Plain):
    """n_shared_experts, each as wide as an expert: one MLP of their width together."""

    fields: tuple[str, ...] = ("shared_intermediate_size",)
    config_keys: tuple[str, ...] = ("n_shared_experts",)

    def read(self, config: Config) -> dict[str, Any]:
        number, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
        if not (isinstance(number, int) and isinstance(width, int)):
            return {}
        return {"shared_intermediate_size": number * width}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        values = shape_fields(shape)
        return {"n_shared_experts": values["shared_intermediate_size"] // values["moe_intermediate_size"]}

    def inexpressible(self, shape: ModelShape) -> Iterator[tuple[str, Any, Any]]:
        values = shape_fields(shape)
        shared, width = (values.get(f"{kind}_intermediate_size") for kind in ("shared", "moe"))
        if width and (not shared or shared % width):
            yield "shared_intermediate_size", shared, f"a multiple of moe_intermediate_size = {width}"


def words(experts: int) -> tuple[Words, ...]:
    """Return the words of both families. experts: transformers' number for a file that has none."""
    routed = ExpertCount(
        "n_routed_experts",
        experts,
        config_keys=("n_routed_experts", "num_experts", "num_local_experts"),
    )
    return Rope(scalings=("yarn",)), ATTENTION_BIAS, LatentHeads(), SharedExperts(), routed


def of_experts(number: int, chosen: int, width: int, shared: int, dense_layers: int) -> dict[str, Any]:
    """Return settings of a preset: latent attention, experts of one width, and the layers before them."""
    return {
        **_HEADS,
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_intermediate_size": shared * width,
        "first_k_dense_replace": dense_layers,
    }


def stretched(scale: float) -> dict[str, Any]:
    """Return settings of a preset for 163,840 positions; scale: mscale and mscale_all_dim."""
    own = {"rope_type": "yarn", "rope_factor": 40.0, "rope_original_positions": 4096}
    return {**own, "rope_mscale": scale, "rope_mscale_all_dim": scale}
