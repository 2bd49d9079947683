"""Rotary frequencies [rotary_dim / 2] of a model's shape, stretched as its RopeScaling says."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megalite.ops.rotary import rotary_frequencies as unscaled_frequencies
from megalite.topology.shape import ModelShape, RopeScaling


def rotary_frequencies(shape: ModelShape, length: int | Tensor) -> Tensor:
    """Return radians a position for each rotated pair: [rotary_dim / 2], float64.

    length: tokens of the sequence; "dynamic" and "longrope" depend on it. "dynamic" takes a tensor of lengths too, of
    shape [...], and returns [..., rotary_dim / 2].
    """
    scaling = shape.rope_scaling
    if scaling is None:
        return unscaled_frequencies(shape.rotary_dim, shape.rope_theta)
    return _SCALED[scaling.rope_type](shape, scaling, length)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of cosines and sines, and so the root of the scores' factor; 1 unless YaRN or LongRoPE."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_original(scaling))) if factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.yarn_scale(scaling.mscale) / scaling.yarn_scale(scaling.mscale_all_dim)
    return scaling.yarn_scale()


def _linear(shape: ModelShape, scaling: RopeScaling, length: int | Tensor) -> Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return unscaled_frequencies(shape.rotary_dim, shape.rope_theta) / scaling.factor


def _dynamic(shape: ModelShape, scaling: RopeScaling, length: int | Tensor) -> Tensor:
    """NTK-aware scaling: the base grows with the sequence once it is longer than max_position_embeddings."""
    dim, longest = shape.rotary_dim, shape.max_position_embeddings
    lengths = torch.as_tensor(length, dtype=torch.float64).clamp(min=longest)
    stretch = scaling.factor * lengths / longest - (scaling.factor - 1)
    return unscaled_frequencies(dim, (shape.rope_theta * stretch ** (dim / (dim - 2))).unsqueeze(-1))


def _llama3(shape: ModelShape, scaling: RopeScaling, length: int | Tensor) -> Tensor:
    """Llama 3.1: frequencies that turn rarely within the original length are slowed, the others stay."""
    frequencies = unscaled_frequencies(shape.rotary_dim, shape.rope_theta)
    slow = frequencies / scaling.factor
    turns = _original(scaling) * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return slow + (frequencies - slow) * kept


def _yarn(shape: ModelShape, scaling: RopeScaling, length: int | Tensor) -> Tensor:
    """YaRN, "NTK by parts" (Peng et al. 2023, section 3.2): a linear ramp over the pairs between two turn counts."""
    frequencies, dim = unscaled_frequencies(shape.rotary_dim, shape.rope_theta), shape.rotary_dim

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair that makes `turns` turns within the original length."""
        return dim * math.log(_original(scaling) / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)


def _longrope(shape: ModelShape, scaling: RopeScaling, length: int | Tensor) -> Tensor:
    """LongRoPE (Ding et al. 2024): a divisor for each pair, one set up to the original length, another beyond."""
    divisors = scaling.long_factor if length > _original(scaling) else scaling.short_factor
    return unscaled_frequencies(shape.rotary_dim, shape.rope_theta) / torch.tensor(
        divisors, dtype=torch.float64
    )


def _original(scaling: RopeScaling) -> int:
    return scaling.original_max_position_embeddings


_SCALED: dict[str, Callable[[ModelShape, RopeScaling, int | Tensor], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
