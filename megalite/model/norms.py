"""Normalisation layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.ops.norms import rms_norm
from megalite.topology.parameters import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned weight [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm(hidden_states, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016) with a learned weight and bias [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(shape: ModelShape, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The norm of the model's residual stream."""
    kind = RMSNorm if shape.norm == "rms_norm" else LayerNorm
    return kind(shape.hidden_size, shape.rms_norm_eps, dtype=dtype)
