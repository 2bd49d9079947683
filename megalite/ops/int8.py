"""Weights in int8 with one scale for each output channel: W = q * scale, symmetric. For inference alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.few_rows import compiled_pays

LARGEST = 127


def quantise_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (int8 [out, in], scale [out, 1] of `dtype`) of a weight [out, in].

    The largest magnitude of a row is 127 steps; no value moves by more than half a step.
    """
    exact = weight.float()
    scale = (exact.abs().amax(dim=1, keepdim=True) / LARGEST).to(dtype)
    scale = scale.masked_fill(scale == 0, 1)
    return (exact / scale.float()).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q * scale [out, in], rounded once to `dtype`."""
    return weight.to(dtype).mul_(scale)


def int8_linear(inputs: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return X W^T [..., out] for inputs [..., in]; weight: int8 [out, in], scale: [out, 1]. Outside autograd.

    A few rows on a CPU go to the compiled operator; elsewhere the weight is dequantised for the product.
    """
    if compiled_pays(inputs, weight):
        product: Tensor = torch.ops.megalite.few_rows_linear(inputs, weight, scale)
        return product
    return F.linear(inputs, dequantised(weight, scale, inputs.dtype))
