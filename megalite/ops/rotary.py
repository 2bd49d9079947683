"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split form of Llama."""

import torch
from torch import Tensor


def rotary_table(positions: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position: two tensors [positions, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), theta**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each head by its position's angles.

    heads: [B, S, heads, head_dim]; cosines, sines: [B or 1, S, 1, head_dim / 2] in the same dtype.
    Dimension i is paired with i + head_dim / 2.
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
