"""Weights in FP8 as DeepSeek-V3 publishes them: float8_e4m3fn, with one factor for each block of 128 x 128.

`name.weight` [out, in] stands beside `name.weight_scale_inv` [out / 128, in / 128], rounded up; the weight is their
product (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.2).
"""

from dataclasses import replace

import torch
from torch import Tensor

from megalite.config.sources.quantisation import FP8_BLOCK
from megalite.families.tensors import FamilyTensor
from megalite.topology.sharding import TensorSlice

FP8 = "F8_E4M3"
"""The type of a weight's values, in safetensors' words."""
SCALE = "_scale_inv"


def scale_of(tensor: FamilyTensor) -> FamilyTensor:
    """Return the tensor of the factors of one in FP8."""
    blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
    return replace(tensor, name=f"{tensor.name}{SCALE}", shape=blocks)


def region_of_scales(region: TensorSlice) -> TensorSlice:
    """Return the factors of a region of the weight."""
    ends = (offset + size for offset, size in zip(region.offsets, region.shape, strict=True))
    first = tuple(offset // FP8_BLOCK for offset in region.offsets)
    last = (-(-end // FP8_BLOCK) for end in ends)
    return TensorSlice(first, tuple(end - start for start, end in zip(first, last, strict=True)))


def scaled(values: Tensor, scales: Tensor, region: TensorSlice) -> Tensor:
    """Return a region of the weight in float32. scales: those of `region_of_scales`."""
    factors = scales.float()
    for dim, (offset, size) in enumerate(zip(region.offsets, region.shape, strict=True)):
        blocks = torch.arange(offset, offset + size) // FP8_BLOCK - offset // FP8_BLOCK
        factors = factors.index_select(dim, blocks)
    return factors.mul_(values.float())
