"""Gated activations of the feed-forward block (Shazeer, "GLU variants improve Transformer", 2020)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    if torch.compiler.is_compiling():  # which fuses what it sees, and sees no further than a node of ours
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    activated: Tensor = _SwiGLU.apply(gate_up)
    return activated
