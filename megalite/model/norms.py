"""Normalisation layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.model.options import PLAIN, ModelOptions
from megalite.ops.norms import rms_norm
from megalite.topology.parameters import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned weight [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float, options: ModelOptions = PLAIN):
        super().__init__()
        self.eps, self.split_backward = eps, options.split_backward
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=options.dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return rms_norm(hidden_states, self.weight, self.eps, split_backward=self.split_backward)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016) with a learned weight and bias [hidden_size]."""

    def __init__(self, hidden_size: int, eps: float, options: ModelOptions = PLAIN):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=options.dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=options.dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(shape: ModelShape, options: ModelOptions = PLAIN) -> nn.Module:
    """The norm of the model's residual stream."""
    kind = RMSNorm if shape.norm == "rms_norm" else LayerNorm
    return kind(shape.hidden_size, shape.rms_norm_eps, options)
