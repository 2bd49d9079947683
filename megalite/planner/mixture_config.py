"""The config.json of mixtures that are planned alone: `megalite train` refuses these families.

A row of MIXTURES says which keys of a family's file hold what transformers' class of that family builds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, Problem
from megalite.topology.experts import ExpertShape, MixtureShape

_Config = Mapping[str, Any]
_NUMBER = ("num_local_experts", "num_experts")


@dataclass(frozen=True)
class MixtureReading:
    """How a family's config.json is read.

    width: the key of an expert's width. shared: that of the shared MLP's width. bias: keys of the biases of attention's
    inputs and of its output. absent: transformers' defaults. fixed, experts: fields of MixtureShape and ExpertShape
    that the family fixes.
    """

    width: str = "moe_intermediate_size"
    shared: str | None = None
    bias: tuple[str | None, str | None] = ("attention_bias", "attention_bias")
    absent: _Config = field(default_factory=dict)
    fixed: _Config = field(default_factory=dict)
    experts: _Config = field(default_factory=dict)


MIXTURES: Mapping[str, MixtureReading] = {
    "phimoe": MixtureReading("intermediate_size", fixed={"norm": "layer_norm"}),
    "qwen2_moe": MixtureReading(
        shared="shared_expert_intermediate_size",
        bias=("qkv_bias", None),
        absent={"qkv_bias": True},
        experts={"shared_gate": True},
    ),
}


def read_mixture(file: Path) -> MixtureShape | None:
    """Return the shape of a mixture's config.json or of its folder; None if it is no mixture, or no JSON.

    Raises ConfigError for a key that is missing, or for a value whose model is not known here.
    """
    path = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the configuration's own reader says what is wrong
    reading = MIXTURES.get(str(config.get("model_type"))) if isinstance(config, dict) else None
    if reading is None:
        return None
    try:
        return mixture_shape(config)
    except KeyError as missing:
        message = f"{path} has no {missing.args[0]}, which {config['model_type']} needs"
        raise ConfigError(
            [Problem("MODEL", message, "take the config.json that its publishers wrote")]
        ) from None


class MixtureRun(RunConfig):
    """A run of a mixture's dense sizes, which the rules of a run know, with the shape of the mixture."""

    _mixture: MixtureShape

    @classmethod
    def of(cls, config: RunConfig, mixture: MixtureShape) -> "MixtureRun":
        run = cls.model_construct(**dict(config))
        run._mixture = mixture
        return run

    def shape(self, tokenizer_size: int) -> MixtureShape:
        """Return the mixture's shape; it has its own vocabulary."""
        return self._mixture


def mixture_shape(config: _Config) -> MixtureShape:
    """Return the shape that a mixture's config.json describes.

    Raises KeyError with a key that it lacks, ConfigError for a value whose model is not known here.
    """
    reading = MIXTURES[config["model_type"]]
    config = {key: value for key, value in {**reading.absent, **config}.items() if value is not None}
    if config.get("tie_word_embeddings") and config.get("lm_head_bias"):
        raise _unknown(config, "lm_head_bias", "only an untied head with a bias can be planned")
    heads = config["num_attention_heads"]
    biases = (config.get(key, False) if key else False for key in reading.bias)
    dense = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", config["hidden_size"] // heads),
        "max_position_embeddings": config["max_position_embeddings"],
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "head_bias": config.get("lm_head_bias", False),
        **dict(zip(("attention_bias", "attention_output_bias"), biases, strict=True)),
        **_windows(config),
    }
    shape = MixtureShape(**{**dense, **reading.fixed}, experts=_experts(config, reading))
    windows = [shape.window_of(layer) is not None for layer in range(shape.num_hidden_layers)]
    if [kind == "sliding_attention" for kind in config.get("layer_types", ())] not in ([], windows):
        raise _unknown(config, "layer_types", "only the family's own order of windows can be planned")
    return shape


def _unknown(config: _Config, key: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("MODEL", f"{config['model_type']} has {key} = {config[key]}", remedy)])


def _experts(config: _Config, reading: MixtureReading) -> ExpertShape:
    number = next((config[key] for key in _NUMBER if key in config), None)
    if number is None:
        raise KeyError(" or ".join(_NUMBER))
    shared = 0 if reading.shared is None else config[reading.shared]
    return ExpertShape(
        number,
        config["num_experts_per_tok"],
        config[reading.width],
        shared,
        mlp_only_layers=tuple(config.get("mlp_only_layers", ())),
        decoder_sparse_step=config.get("decoder_sparse_step", 1),
        **reading.experts,
    )


def _windows(config: _Config) -> dict[str, Any]:
    """Return the sliding window, and the first layers that have none."""
    if not config.get("use_sliding_window", True) or "sliding_window" not in config:
        return {}
    return {
        "sliding_window": config["sliding_window"],
        "full_attention_layers": config.get("max_window_layers", 0),
    }
