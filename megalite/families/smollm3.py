"""SmolLM 3 (Bakouch et al. 2025): Llama without rotary embedding in every n-th layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.families.family import SILU, Family, sizes
from megalite.families.rope import Rope
from megalite.families.windows import LayerTypes
from megalite.families.words import ATTENTION_BIAS, MLP_BIAS, Config, Plain
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class NoRopeLayers(Plain):
    """no_rope_layers has 1 for each layer with rotary embedding; without it, no_rope_layer_interval counts."""

    fields: tuple[str, ...] = ("no_rope_every",)
    config_keys: tuple[str, ...] = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, config: Config) -> dict[str, Any]:
        return {"no_rope_every": _no_rope_every(config)}

    def write(self, shape: ModelShape) -> dict[str, Any]:
        return {"no_rope_layers": [int(shape.rotates(layer)) for layer in range(shape.num_hidden_layers)]}

    def refused(self, config: Config) -> Iterator[tuple[str, str]]:
        rotating = config.get("no_rope_layers")
        if isinstance(rotating, list) and rotating:
            every = _no_rope_every(config)
            if [bool(each) for each in rotating] != _rotating(every, len(rotating)):
                yield "mixes no_rope_layers", "only every n-th layer may be without rotary embedding"


@dataclass(frozen=True)
class NoRopeWindows(LayerTypes):
    """Without layer_types, the layers without rotary embedding have the window, where use_sliding_window is set."""

    config_keys: tuple[str, ...] = ("sliding_window", "layer_types", "use_sliding_window")

    def older_keys(self, shape: ModelShape) -> dict[str, Any]:
        return {"use_sliding_window": shape.sliding_window is not None}

    def without_layer_types(self, config: Config) -> tuple[int, int] | None:
        layers, every = config.get("num_hidden_layers", 0), _no_rope_every(config)
        if config.get("use_sliding_window", False) and config.get("sliding_window") and every:
            return (0, 0) if every == 1 else None
        return layers, 0


def _no_rope_every(config: Config) -> Any:
    rotating = config.get("no_rope_layers")
    if not isinstance(rotating, list):
        return config.get("no_rope_layer_interval")
    return rotating.index(0) + 1 if 0 in rotating else 0


def _rotating(every: int, layers: int) -> list[bool]:
    return [not (every and (layer + 1) % every == 0) for layer in range(layers)]


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    published="2025-07",
    words=(Rope(), NoRopeLayers(), NoRopeWindows(), ATTENTION_BIAS, MLP_BIAS),
    required=SILU,
    absent=sizes(
        *(2048, 11008, 36, 16, 4, 32768),
        vocab_size=128256,
        rms_norm_eps=1e-6,
        rope_theta=2000000.0,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    presets={
        "smollm3-3b": sizes(
            *(2048, 11008, 36, 16, 4, 65536),
            vocab_size=128256,
            rope_theta=5000000.0,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            no_rope_every=4,
        ),
    },
)
