"""The quantization_config of a Hugging Face folder: int8 weights of compressed-tensors, and DeepSeek-V3's in FP8."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = "quantization_config"
# Weights alone in int8 are "pack-quantized" for compressed-tensors and vLLM: "int-quantized" has int8 inputs too.
_FORM = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_NONE_ELSE = ("input_activations", "output_activations")
FP8_BLOCK = 128
"""The rows and columns of a weight in FP8 that have one factor."""
_FP8 = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config")


def int8_config(ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config of int8 weights, one scale for each output channel.

    ignored: the modules that are not quantised, the output projection and routers, as compressed-tensors names them.
    """
    group = {"targets": ["Linear"], "weights": dict(_WEIGHTS), **dict.fromkeys(_NONE_ELSE)}
    more = {"quantization_status": "compressed", "kv_cache_scheme": None, "ignore": ignored}
    return {**_FORM, **more, "config_groups": {"group_0": group}}


def is_int8(config: Any) -> bool:
    """Whether a quantization_config is that of `int8_config`, in all that changes the weights' meaning."""
    if not isinstance(config, Mapping) or not _has(config, _FORM):
        return False
    if any(config.get(name) for name in _ABSENT):
        return False
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return False
    [group] = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        return False
    weights = group.get("weights")
    alone = not any(group.get(name) for name in _NONE_ELSE)
    return alone and isinstance(weights, Mapping) and _has({"dynamic": False, **weights}, _WEIGHTS)


def is_block_fp8(config: Any) -> bool:
    """Whether a quantization_config is that of weights in float8_e4m3fn with a factor for each block, as DeepSeek-V3's.

    Such weights are read as numbers, and nothing is computed in FP8.
    """
    return isinstance(config, Mapping) and _has({"fmt": "e4m3", **config}, {**_FP8, "fmt": "e4m3"})


def is_mxfp4(config: Any) -> bool:
    """Whether a quantization_config is that of published gpt-oss, whose experts are read as bfloat16."""
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def holds_int8(folder: Path) -> bool:
    """Whether a Hugging Face folder has int8 weights that megalite reads."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and is_int8(config.get(KEY))


def _has(config: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(config.get(name) == value for name, value in expected.items())
