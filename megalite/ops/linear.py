"""Products with a weight for inference, a float or an int8 one: a few rows, as of a decode step, are compiled."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension

# The most rows with which the compiled operator, built for AVX2 too, is not slower than torch's product, by the type of
# the inputs. Measured on one and two cores (benchmarks/generation.py); bfloat16 has instructions that torch uses.
_MOST_ROWS = {torch.float32: 16, torch.float64: 16, torch.bfloat16: 8}
# An int8 weight is read in a quarter of the time; without the operator, it is dequantised for the product.
_MOST_ROWS_INT8 = 16
LARGEST = 127
"""The largest magnitude of an int8 weight, which is W = q * scale, symmetric, with one scale an output channel."""


def few_rows_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs weight^T + bias [..., out] for inputs [..., in] and weight [out, in], outside autograd.

    A few rows on a CPU go to the compiled operator, whose sums are at least float32; other products are torch's.
    """
    if not compiled_pays(inputs, weight):
        return F.linear(inputs, weight, bias)
    product: Tensor = torch.ops.megalite.few_rows_linear(inputs, weight)
    return product if bias is None else product.add_(bias)


def compiled_pays(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether the compiled operator serves this product, and is not slower than torch's."""
    most = _MOST_ROWS_INT8 if weight.dtype == torch.int8 else _MOST_ROWS.get(inputs.dtype, 0)
    return (
        inputs.numel() <= most * inputs.shape[-1]
        and inputs.device.type == "cpu"
        and (weight.dtype in (inputs.dtype, torch.int8))
        and extension.available("cpu")
    )


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


def _fake(inputs: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


extension.register("few_rows_linear", _fake)
