"""Gated activations of the feed-forward block (Shazeer, "GLU variants improve Transformer", 2020), and bias + GELU
(Hendrycks and Gimpel 2016).

Each in two forms: plain torch, and the compiled operators of csrc/activations.h.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension

# As torch.nn.functional.gelu has it: by the error function, or its approximation by tanh.
Approximate = Literal["none", "tanh"]

# The codes of csrc/core/activation.h.
_SILU = 0
_GELU = {"none": 1, "tanh": 2}


class _SwiGLU(torch.autograd.Function):
    """One node on the packed projection: its gradient is written packed, with no concatenation."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return gate_up_grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the packed [..., 2 I] (gate first) -> [..., I]."""
    activated: Tensor
    if torch.compiler.is_compiling():  # which fuses what it sees, and sees no further than a node of ours
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    activated = _SwiGLU.apply(gate_up)
    return activated


def compiled_swiglu(gate_up: Tensor) -> Tensor:
    """As of `swiglu`."""
    activated: Tensor = torch.ops.megalite.glu(gate_up, _SILU)
    return activated


def geglu(gate_up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """gelu(gate) * up of the packed [..., 2 I] (gate first) -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def compiled_geglu(gate_up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """As of `geglu`."""
    activated: Tensor = torch.ops.megalite.glu(gate_up, _GELU[approximate])
    return activated


def bias_gelu(inputs: Tensor, bias: Tensor | None, *, approximate: Approximate = "none") -> Tensor:
    """gelu(inputs + bias), [..., I] -> [..., I]; without a bias gelu(inputs)."""
    return F.gelu(inputs if bias is None else inputs + bias, approximate=approximate)


def compiled_bias_gelu(inputs: Tensor, bias: Tensor | None, *, approximate: Approximate = "none") -> Tensor:
    """As of `bias_gelu`. One node gives both gradients: a schedule that splits the backward has the linear before add
    the bias."""
    activated: Tensor = torch.ops.megalite.bias_gelu(inputs, bias, _GELU[approximate])
    return activated


def _glu_like(gate_up: Tensor, activation: int) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _keep_gate_up(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _glu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.megalite.glu_backward(grad, *ctx.saved_tensors, ctx.activation), None


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: Tensor) -> None:
    *kept, ctx.activation = inputs
    ctx.save_for_backward(*kept)


def _bias_gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    inputs, bias = ctx.saved_tensors
    inputs_grad, bias_grad = torch.ops.megalite.bias_gelu_backward(grad, inputs, bias, ctx.activation)
    return inputs_grad, None if bias is None else bias_grad, None


def _bias_gelu_grads_like(
    grad: Tensor, inputs: Tensor, bias: Tensor | None, activation: int
) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(inputs.shape), inputs.new_empty(0 if bias is None else inputs.shape[-1])


extension.register("glu", _glu_like, _glu_backward, _keep_gate_up)
extension.register("glu_backward", lambda grad, gate_up, activation: gate_up.new_empty(gate_up.shape))
extension.register(
    "bias_gelu",
    lambda inputs, bias, activation: inputs.new_empty(inputs.shape),
    _bias_gelu_backward,
    _keep_inputs,
)
extension.register("bias_gelu_backward", _bias_gelu_grads_like)
