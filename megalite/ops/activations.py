"""Gated activations of the feed-forward block (Shazeer, "GLU variants improve Transformer", 2020), and bias + GELU
(Hendrycks and Gimpel 2016).

Each has two forms: plain torch, and the compiled operators of csrc/activations.h.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension

# As in torch.nn.functional.gelu: the exact error function ("none") or the tanh approximation.
Approximate = Literal["none", "tanh"]

# gate * sigmoid(1.702 gate) of gpt-oss is close to GELU.
_CLAMPED_SLOPE = 1.702
# The codes of csrc/core/activation.h.
SILU = 0
GELU = {"none": 1, "tanh": 2}


class _SwiGLU(torch.autograd.Function):
    """SwiGLU as one autograd node: the gradient is written straight into the packed layout, without a concatenation."""

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
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return gate_up_grad


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., I] of the packed projection [..., 2 I], gate first."""
    activated: Tensor
    if torch.compiler.is_compiling():  # torch.compile cannot fuse across a custom autograd node
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    activated = _SwiGLU.apply(gate_up)
    return activated


def compiled_swiglu(gate_up: Tensor) -> Tensor:
    """Same as `swiglu`, by the compiled operator."""
    activated: Tensor = _glu(gate_up, SILU)
    return activated


class _ClampedSwiGLU(torch.autograd.Function):
    """One autograd node, which saves its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return torch.sigmoid(gate * _CLAMPED_SLOPE).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,), limit = ctx.saved_tensors, ctx.limit
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        clamped = gate.clamp(max=limit)
        share = torch.sigmoid(clamped * _CLAMPED_SLOPE)
        torch.mul(share * clamped, grad, out=up_grad)
        up_grad.masked_fill_(up.abs() > limit, 0)
        slope = (1 - share).mul_(clamped).mul_(_CLAMPED_SLOPE).add_(1).mul_(share)
        torch.mul(slope.mul_(up.clamp(-limit, limit).add_(1)), grad, out=gate_grad)
        gate_grad.masked_fill_(gate > limit, 0)
        return gate_up_grad, None


def clamped_swiglu(gate_up: Tensor, *, limit: float) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1) [..., I] of [..., 2 I], gate first (OpenAI 2025, gpt-oss).

    The gate is at most `limit`, and up between -limit and limit; what is clamped has no gradient.
    """
    activated: Tensor = _ClampedSwiGLU.apply(gate_up, limit)
    return activated


def geglu(gate_up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """Return gelu(gate) * up [..., I] of the packed projection [..., 2 I], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def compiled_geglu(gate_up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """Same as `geglu`, by the compiled operator."""
    activated: Tensor = _glu(gate_up, GELU[approximate])
    return activated


def bias_gelu(inputs: Tensor, bias: Tensor | None, *, approximate: Approximate = "none") -> Tensor:
    """Return gelu(inputs + bias), [..., I] -> [..., I]; without a bias gelu(inputs)."""
    return F.gelu(inputs if bias is None else inputs + bias, approximate=approximate)


def compiled_bias_gelu(inputs: Tensor, bias: Tensor | None, *, approximate: Approximate = "none") -> Tensor:
    """Same as `bias_gelu`, by the compiled operator.

    One autograd node gives both gradients, so under a schedule that splits the backward the preceding linear adds the
    bias instead.
    """
    activated: Tensor = _bias_gelu(inputs, bias, GELU[approximate])
    return activated


class GatedActivations(NamedTuple):
    """One implementation: `swiglu` and `geglu`."""

    swiglu: Callable[[Tensor], Tensor]
    geglu: Callable[..., Tensor]


class BiasGelu(NamedTuple):
    """One implementation: `bias_gelu`.

    adds_bias: its backward also sums the bias gradient, without reading any more memory; otherwise the preceding
    linear adds the bias.
    """

    activate: Callable[..., Tensor]
    adds_bias: bool


TORCH_GLU = GatedActivations(swiglu, geglu)
COMPILED_GLU = GatedActivations(compiled_swiglu, compiled_geglu)
TORCH_BIAS_GELU = BiasGelu(bias_gelu, adds_bias=False)
COMPILED_BIAS_GELU = BiasGelu(compiled_bias_gelu, adds_bias=True)


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


_glu = extension.register("glu", _glu_like, _glu_backward, _keep_gate_up)
extension.register("glu_backward", lambda grad, gate_up, activation: gate_up.new_empty(gate_up.shape))
_bias_gelu = extension.register(
    "bias_gelu",
    lambda inputs, bias, activation: inputs.new_empty(inputs.shape),
    _bias_gelu_backward,
    _keep_inputs,
)
extension.register("bias_gelu_backward", _bias_gelu_grads_like)


def soft_capped(values: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(values / cap), element by element; saves one tensor of the same size.

    Source: Bello et al. 2016; of attention scores and logits: Gemma team, "Gemma 2", 2024, section 2.
    """
    return torch.tanh(values / cap) * cap


def cap_with_slope(values: Tensor, cap: float) -> Tensor:
    """Cap the values in place and return the slope of the soft cap at each original value."""
    values.div_(cap).tanh_()
    slope = 1 - values.square()
    values.mul_(cap)
    return slope
