"""Rotary position embedding: a table built once a stage, looked up once a micro batch."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.ops.rotary import rotary_table


class Rotation(NamedTuple):
    """The angles of one micro batch's positions, shared by all layers: [B or 1, S, 1, head_dim / 2] each."""

    cosines: Tensor
    sines: Tensor


class RotaryEmbedding(nn.Module):
    """Angles for positions up to `positions`."""

    def __init__(self, positions: int, head_dim: int, theta: float, *, dtype: torch.dtype):
        super().__init__()
        self.cosines: Tensor
        self.sines: Tensor
        cosines, sines = rotary_table(positions, head_dim, theta, dtype)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, position_ids: Tensor) -> Rotation:
        """position_ids: [B, S] -> the rotation of these positions."""
        return Rotation(self.cosines[position_ids].unsqueeze(2), self.sines[position_ids].unsqueeze(2))
