"""Weights in int8 with one scale for each output channel: W = q * scale, symmetric. For inference alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
# torch's kernel goes over the weights once for each row of the input: beyond these rows a matrix product is faster.
_KERNEL_ROWS = {torch.float32: 4, torch.bfloat16: 16}
# With other lengths of a row the bfloat16 kernel of torch 2.13 reads beyond the weights.
_KERNEL_COLUMNS = 32


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

    torch's int8 kernel serves few rows on a CPU; elsewhere the weight is dequantised for the product.
    """
    if not _kernel_serves(inputs, weight):
        return F.linear(inputs, dequantised(weight, scale, inputs.dtype))
    rows = inputs.flatten(0, -2)
    product = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), weight, scale.flatten().to(inputs.dtype))
    return product.unflatten(0, inputs.shape[:-1])


def _kernel_serves(inputs: Tensor, weight: Tensor) -> bool:
    out_features, in_features = weight.shape
    rows = inputs.numel() // max(1, in_features)
    whole = in_features % _KERNEL_COLUMNS == 0 and out_features > 0
    return weight.device.type == "cpu" and whole and 0 < rows <= _KERNEL_ROWS.get(inputs.dtype, 0)
