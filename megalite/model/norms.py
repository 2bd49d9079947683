"""Normalisation layers."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from megalite.model.options import PLAIN, ModelOptions
from megalite.ops import liger
from megalite.ops.norms import fused_add_norm, layer_norm, rms_norm, why_not_fused
from megalite.topology.shape import ModelShape


class Norm(nn.Module, ABC):
    """A norm of the last dim with what is learned of it [hidden_size]; alone, or of the sum with a residual.

    offset: it multiplies by 1 + weight.
    """

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float, options: ModelOptions = PLAIN, *, offset: bool = False):
        super().__init__()
        self.eps, self.offset, self.split_backward = eps, offset, options.split_backward
        serves = not why_not_fused(options.dtype, offset=offset)
        self.fused = serves and options.operators.uses("norm")
        # One node of it gives both gradients, and the compiler sees no further than that node.
        alone = offset or options.split_backward or options.compile
        self.by_liger = not alone and options.operators.uses("norm", liger.LIGER)
        self.fused_add = serves and options.operators.uses("add_norm")
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=options.dtype))
        self.register_parameter("bias", None)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., H] -> [..., H]; with a residual the sum of both, which may overwrite hidden_states, and its norm."""
        if residual is None:
            return self.normalised(hidden_states)
        if self.fused_add:
            return fused_add_norm(
                hidden_states,
                residual,
                self.weight,
                self.bias,
                self.eps,
                offset=self.offset,
                split_backward=self.split_backward,
            )
        total = hidden_states.add_(residual)
        return total, self.normalised(total)

    @abstractmethod
    def normalised(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]: the norm alone."""


class RMSNorm(Norm):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) with a weight [hidden_size]."""

    def normalised(self, hidden_states: Tensor) -> Tensor:
        if self.by_liger:
            return liger.rms_norm(hidden_states, self.weight, self.eps)
        form = {"offset": self.offset, "split_backward": self.split_backward, "fused": self.fused}
        return rms_norm(hidden_states, self.weight, self.eps, **form)


class LayerNorm(Norm):
    """Layer normalisation (Ba et al. 2016) with a weight and a bias [hidden_size]."""

    bias: nn.Parameter

    def __init__(self, hidden_size: int, eps: float, options: ModelOptions = PLAIN):
        super().__init__(hidden_size, eps, options)
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=options.dtype))

    def normalised(self, hidden_states: Tensor) -> Tensor:
        form = {"split_backward": self.split_backward, "fused": self.fused}
        return layer_norm(hidden_states, self.weight, self.bias, self.eps, **form)


def build_norm(shape: ModelShape, options: ModelOptions = PLAIN) -> nn.Module:
    """The norm of the model's residual stream."""
    if shape.norm == "rms_norm":
        return RMSNorm(shape.hidden_size, shape.rms_norm_eps, options, offset=shape.zero_centered_gamma)
    return LayerNorm(shape.hidden_size, shape.rms_norm_eps, options)
