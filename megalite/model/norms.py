"""Normalisation layers."""

import torch
from torch import Tensor, nn

from megalite.ops.norms import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned weight [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm(hidden_states, self.weight, self.eps)
