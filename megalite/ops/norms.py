"""Root-mean-square norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), also of a sum with the residual.

Each in two forms: plain torch, and the compiled operators of csrc/norms.h (`fused`).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension


class _RMSNorm(torch.autograd.Function):
    """One node instead of six: it keeps only its input and one number a token for the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        # Statistics in at least float32, whatever the type of the activations.
        wide = hidden_states.float() if hidden_states.element_size() < 4 else hidden_states
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden_states, weight, inverse_rms)
        ctx.offset = offset
        if offset:
            return (wide * inverse_rms).mul_(1 + weight.to(wide.dtype)).to(hidden_states.dtype)
        return (wide * inverse_rms).to(hidden_states.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_states, weight, inverse_rms = ctx.saved_tensors
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        wide = flat.float() if flat.element_size() < 4 else flat
        grad = grad.reshape(flat.shape).to(wide.dtype)
        inverse_rms = inverse_rms.view(-1, 1)
        normalised = wide * inverse_rms
        products = grad * normalised
        weight_grad = products.sum(dim=0)
        factor = weight.to(wide.dtype) + 1 if ctx.offset else weight.to(wide.dtype)
        # The part of the gradient along the input itself, which normalisation removes.
        projection = torch.mv(products, factor).div_(flat.shape[-1])
        scaled_grad = grad * factor
        scaled_grad.addcmul_(normalised, projection.unsqueeze(-1), value=-1).mul_(inverse_rms)
        return scaled_grad.to(flat.dtype).view_as(hidden_states), weight_grad.to(weight.dtype), None, None


class _Normalise(torch.autograd.Function):
    """The norm without its weight, so that a product gives the weight's gradient when it is asked for."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = hidden_states.float() if hidden_states.element_size() < 4 else hidden_states
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        normalised = (wide * inverse_rms).to(dtype)
        ctx.save_for_backward(normalised, inverse_rms)
        ctx.dtype = hidden_states.dtype
        return normalised

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        normalised, inverse_rms = ctx.saved_tensors
        wide = grad.to(inverse_rms.dtype)
        projection = (wide * normalised).mean(dim=-1, keepdim=True)
        scaled_grad = torch.addcmul(wide, normalised.to(wide.dtype), projection, value=-1)
        return scaled_grad.mul_(inverse_rms).to(ctx.dtype), None, None


def rms_norm(
    hidden_states: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: bool = False,
    split_backward: bool = False,
    fused: bool = False,
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim: [..., H], weight [H] -> [..., H].

    offset: by 1 + weight (Gemma), added and multiplied in at least float32; plain torch alone has it for narrower
    types (`why_not_fused`).
    split_backward: the gradients of x and of the weight come from nodes of their own.
    """
    if fused:
        return _fused(hidden_states, None, weight, None, eps, offset, split_backward)[1]
    dtype = hidden_states.dtype
    wide_dtype = torch.promote_types(dtype, torch.float32)
    if torch.compiler.is_compiling():  # which fuses what it sees, and sees no further than a node of ours
        wide = hidden_states.to(wide_dtype)
        inverse_rms = wide.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
        if offset:
            return (wide * inverse_rms * (1 + weight.to(wide_dtype))).to(dtype)
        return (wide * inverse_rms).to(dtype) * weight
    normalised: Tensor
    if not split_backward:
        normalised = _RMSNorm.apply(hidden_states, weight, eps, offset)
        return normalised
    normalised = _Normalise.apply(hidden_states, eps, wide_dtype if offset else dtype)
    return (normalised * (1 + weight.to(wide_dtype))).to(dtype) if offset else normalised * weight


def why_not_fused(dtype: torch.dtype, *, offset: bool) -> str:
    """Why the compiled operator cannot serve a norm whose weights are of this type; empty where it can."""
    if offset and dtype.itemsize < 4:
        return "1 + weight would be rounded to the weights' 16 bits"
    return ""


def layer_norm(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    split_backward: bool = False,
    fused: bool = False,
) -> Tensor:
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dim: [..., H] -> [..., H]."""
    if fused:
        return _fused(hidden_states, None, weight, bias, eps, False, split_backward)[1]
    return F.layer_norm(hidden_states, weight.shape, weight, bias, eps)  # computes what a pass asks for


def fused_add_norm(
    hidden_states: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    split_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden_states + residual, and its norm: the layer norm where there is a bias, else the root-mean-square norm.

    offset: as of rms_norm.
    """
    return _fused(hidden_states, residual, weight, bias, eps, offset, split_backward)


def _fused(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: bool,
    split_backward: bool,
) -> tuple[Tensor, Tensor]:
    """What was normalised (x, or its sum with the residual), and the norm."""
    operator = torch.ops.megalite.norm
    if not (split_backward and weight.requires_grad and torch.is_grad_enabled()):
        total, output, _, _ = operator(x, residual, 1 + weight if offset else weight, bias, eps)
        return x if residual is None else total, output
    shift = None if bias is None else bias.detach()
    factor = 1 + weight.detach() if offset else weight.detach()
    total, output, mean, inverse = operator(x, residual, factor, shift, eps)
    if residual is None:
        total = x
    statistics = (inverse.detach(),) if bias is None else (mean.detach(), inverse.detach())
    nothing = _WeightGradient.apply(weight, bias, total.detach(), *statistics)
    output = _Joined.apply(output, nothing)
    return total, output


class _WeightGradient(torch.autograd.Function):
    """Of x's shape and without memory, a constant; its backward computes the gradients of weight and bias, for a pass
    that asks for these."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor, *statistics: Tensor) -> Tensor:
        ctx.save_for_backward(x, *statistics)
        return weight.new_zeros(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *mean, inverse = ctx.saved_tensors
        operator = torch.ops.megalite.norm_weight_grad
        weight_grad, bias_grad = operator(grad, x, mean[0] if mean else None, inverse)
        return weight_grad, bias_grad if mean else None, None, *(None for _ in (*mean, inverse))


class _Joined(torch.autograd.Function):
    """The first, whose gradient both get."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, nothing: Tensor) -> Tensor:
        # Itself, which a residual may be added to, and not a view, which autograd would not let it be.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _norm_like(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, wide = math.prod(x.shape[:-1]), torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty((0,) if residual is None else x.shape),
        x.new_empty(x.shape),
        x.new_empty(0 if bias is None else rows, dtype=wide),
        x.new_empty(rows, dtype=wide),
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
    wanted = zip(ctx.needs_input_grad, (x_grad, x_grad, weight_grad, bias_grad, None), strict=True)
    return tuple(each if needed else None for needed, each in wanted)


extension.register("norm", _norm_like, _norm_backward, _save)
extension.register("norm_backward", _norm_backward_like)
extension.register("norm_input_grad", _norm_input_grad_like)
extension.register("norm_weight_grad", _norm_weight_grad_like)
