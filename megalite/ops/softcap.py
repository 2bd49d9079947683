"""Soft caps of attention scores and logits (Gemma team, "Gemma 2", 2024, section 2; Bello et al. 2016)."""

import torch
from torch import Tensor


def soft_capped(values: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(values / cap), element by element; saves one tensor of the same size for the backward."""
    return torch.tanh(values / cap) * cap


def cap_with_slope(values: Tensor, cap: float) -> Tensor:
    """Cap the values in place and return the slope of the soft cap at each original value."""
    values.div_(cap).tanh_()
    slope = 1 - values.square()
    values.mul_(cap)
    return slope
