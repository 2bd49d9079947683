"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), also fused with the residual add.

Each has two forms: plain torch, by torch's fused kernels where it has them, and the compiled operators of csrc/norms.h.

Everywhere x is [..., H], weight and bias are [H]. A norm without a bias is RMSNorm. zero_centered_gamma: multiply by
1 + weight (Gemma).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension

Norm = Callable[[Tensor, Tensor, Tensor | None, float, bool], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool], tuple[Tensor, Tensor]]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm as one autograd node instead of six; saves only the input and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
        # Statistics are at least float32 for low-precision activations too.
        fp32 = x.float() if x.element_size() < 4 else x
        inverse_rms = torch.linalg.vector_norm(fp32, dim=-1, keepdim=True)
        inverse_rms.square_().div_(fp32.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.zero_centered_gamma = zero_centered_gamma
        if zero_centered_gamma:
            return (fp32 * inverse_rms).mul_(1 + weight.to(fp32.dtype)).to(x.dtype)
        return (fp32 * inverse_rms).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        flat = x.view(-1, x.shape[-1])
        fp32 = flat.float() if flat.element_size() < 4 else flat
        grad = grad.reshape(flat.shape).to(fp32.dtype)
        inverse_rms = inverse_rms.view(-1, 1)
        normalised = fp32 * inverse_rms
        products = grad * normalised
        weight_grad = products.sum(dim=0)
        factor = weight.to(fp32.dtype) + 1 if ctx.zero_centered_gamma else weight.to(fp32.dtype)
        # The gradient's component along the input, which normalisation removes.
        projection = torch.mv(products, factor).div_(flat.shape[-1])
        scaled_grad = grad * factor
        scaled_grad.addcmul_(normalised, projection.unsqueeze(-1), value=-1).mul_(inverse_rms)
        return scaled_grad.to(flat.dtype).view_as(x), weight_grad.to(weight.dtype), None, None


class _FusedZeroCentered(torch.autograd.Function):
    """RMSNorm by 1 + weight for 16 bits, by torch's fused kernels.

    They take one dtype for all, and 16 bits would round 1 + weight. Saves the input as it is, not in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, inverse_rms = torch._fused_rms_norm(x.float(), weight.shape, 1 + weight.float(), eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        needed = [*ctx.needs_input_grad[:2]]
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad.float(), x.float(), weight.shape, inverse_rms, 1 + weight.float(), needed
        )
        x_grad, weight_grad = (
            each.to(x.dtype) if asked else None for each, asked in zip(grads, needed, strict=True)
        )
        return x_grad, weight_grad, None


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """Return the norm of x over its last dim, in plain torch."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)  # computes only the needed gradients
    return rms_norm(x, weight, eps, zero_centered_gamma)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps); 1 + weight is added and multiplied in at least float32."""
    if torch.compiler.is_compiling():
        return _traced_rms_norm(x, weight, eps, zero_centered_gamma)
    normalised: Tensor
    if not has_fused_rms_norm(x.device.type):
        normalised = _RMSNorm.apply(x, weight, eps, zero_centered_gamma)
    elif zero_centered_gamma and weight.dtype.itemsize < 4:
        normalised = _FusedZeroCentered.apply(x, weight, eps)
    else:
        normalised = F.rms_norm(x, weight.shape, 1 + weight if zero_centered_gamma else weight, eps)
    return normalised


@cache
def has_fused_rms_norm(device_type: str) -> bool:
    """Return whether torch has an RMSNorm of one kernel for these devices; elsewhere `F.rms_norm` is a composite, of
    more kernels and autograd nodes than `_RMSNorm`."""
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key)


def _traced_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Compute RMSNorm in traceable operations: torch.compile cannot fuse across a custom autograd node."""
    fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_rms = fp32.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
    if zero_centered_gamma:
        return (fp32 * inverse_rms * (1 + weight.to(fp32.dtype))).to(x.dtype)
    return (fp32 * inverse_rms).to(x.dtype) * weight


def add_then(normalise: Norm) -> AddNorm:
    """Return the function that adds the residual in the memory of x, and normalises the sum by `normalise`."""

    def add(x: Tensor, residual: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return total, normalise(total, *form)

    return add


add_norm: AddNorm = add_then(norm)
"""x + residual in the memory of x, and its norm, in plain torch."""


def compiled_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """Same as `norm`, by the compiled operator if it can."""
    if zero_centered_gamma and weight.dtype.itemsize < 4:
        return norm(x, weight, bias, eps, zero_centered_gamma)  # it would round 1 + weight to 16 bits
    factor = 1 + weight if zero_centered_gamma else weight
    output: Tensor = _norm(x, None, factor, bias, eps)[1]
    return output


def compiled_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + residual in new memory, and its norm; as `add_norm` where the operator would round 1 + weight."""
    if zero_centered_gamma and weight.dtype.itemsize < 4:
        return add_norm(x, residual, weight, bias, eps, zero_centered_gamma)
    factor = 1 + weight if zero_centered_gamma else weight
    total, output, _, _ = _norm(x, residual, factor, bias, eps)
    return total, output


def _norm_like(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, fp32 = math.prod(x.shape[:-1]), torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty((0,) if residual is None else x.shape),
        x.new_empty(x.shape),
        x.new_empty(0 if bias is None else rows, dtype=fp32),
        x.new_empty(rows, dtype=fp32),
    )


def _norm_weight_grad_like(
    grad: Tensor, x: Tensor, mean: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[-1]), x.new_empty(0 if mean is None else x.shape[-1])


def _norm_backward_like(
    grad: Tensor, sum_grad: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_norm_weight_grad_like(grad, x, mean, inverse)


def _norm_input_grad_like(
    grad: Tensor, sum_grad: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor | None, inverse: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _ = inputs
    total, _, mean, inverse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, inverse, *((total,) if residual is None else ()))
    ctx.save_for_backward(x if residual is None else total, weight, None if bias is None else mean, inverse)


def _norm_backward(
    ctx: Any, sum_grad: Tensor | None, grad: Tensor | None, mean_grad: None, inverse_grad: None
) -> tuple[Tensor | None, ...]:
    x, weight, mean, inverse = ctx.saved_tensors
    of_x, of_weight = any(ctx.needs_input_grad[:2]), any(ctx.needs_input_grad[2:4])
    grad = torch.zeros_like(x) if grad is None else grad
    operators = torch.ops.megalite
    x_grad = weight_grad = bias_grad = None
    if of_x and of_weight:
        x_grad, weight_grad, bias_grad = operators.norm_backward(grad, sum_grad, x, weight, mean, inverse)
    elif of_x:
        x_grad = operators.norm_input_grad(grad, sum_grad, x, weight, mean, inverse)
    else:
        weight_grad, bias_grad = operators.norm_weight_grad(grad, x, mean, inverse)
    gradients = zip(ctx.needs_input_grad, (x_grad, x_grad, weight_grad, bias_grad, None), strict=True)
    return tuple(each if needed else None for needed, each in gradients)


_norm = extension.register("norm", _norm_like, _norm_backward, _save)
extension.register("norm_backward", _norm_backward_like)
extension.register("norm_input_grad", _norm_input_grad_like)
extension.register("norm_weight_grad", _norm_weight_grad_like)
