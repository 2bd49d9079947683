"""Root-mean-square layer normalisation (Zhang and Sennrich 2019)."""

from typing import Any

import torch
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """One node instead of six: it keeps only its input and one number a token for the backward."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        # Statistics in at least float32, whatever the type of the activations.
        wide = flat.float() if flat.element_size() < 4 else flat
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms.square_().div_(flat.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden_states, weight, inverse_rms)
        return (wide * inverse_rms).to(flat.dtype).mul_(weight).view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_states, weight, inverse_rms = ctx.saved_tensors
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        wide = flat.float() if flat.element_size() < 4 else flat
        grad = grad.reshape(flat.shape).to(wide.dtype)
        normalised = wide * inverse_rms
        products = grad * normalised
        weight_grad = products.sum(dim=0)
        # The part of the gradient along the input itself, which normalisation removes.
        projection = torch.mv(products, weight.to(wide.dtype)).div_(flat.shape[-1])
        scaled_grad = grad * weight
        scaled_grad.addcmul_(normalised, projection.unsqueeze(-1), value=-1).mul_(inverse_rms)
        return scaled_grad.to(flat.dtype).view_as(hidden_states), weight_grad.to(weight.dtype), None


class _Normalise(torch.autograd.Function):
    """The norm without its weight, so that a product gives the weight's gradient when it is asked for."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, eps: float) -> Tensor:
        wide = hidden_states.float() if hidden_states.element_size() < 4 else hidden_states
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        normalised = (wide * inverse_rms).to(hidden_states.dtype)
        ctx.save_for_backward(normalised, inverse_rms)
        return normalised

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        normalised, inverse_rms = ctx.saved_tensors
        wide = grad.to(inverse_rms.dtype)
        projection = (wide * normalised).mean(dim=-1, keepdim=True)
        scaled_grad = torch.addcmul(wide, normalised.to(wide.dtype), projection, value=-1)
        return scaled_grad.mul_(inverse_rms).to(normalised.dtype), None


def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float, *, split_backward: bool = False) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim: [..., H], weight [H] -> [..., H].

    split_backward: the gradients of x and of the weight come from nodes of their own.
    """
    if torch.compiler.is_compiling():  # which fuses what it sees, and sees no further than a node of ours
        wide = hidden_states.float() if hidden_states.element_size() < 4 else hidden_states
        inverse_rms = wide.square().mean(dim=-1, keepdim=True).add(eps).rsqrt()
        return (wide * inverse_rms).to(hidden_states.dtype) * weight
    normalised: Tensor
    if split_backward:
        normalised = _Normalise.apply(hidden_states, eps)
        return normalised * weight
    normalised = _RMSNorm.apply(hidden_states, weight, eps)
    return normalised
