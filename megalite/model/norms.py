"""The normalisation layer, of either kind."""

import torch
from torch import Tensor, nn

from megalite.model.options import PLAIN, ModelOptions
from megalite.topology.shape import ModelShape


class Norm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) of the last dim with a weight [size]; with a bias [size] layer
    norm (Ba et al. 2016).

    zero_centered_gamma: it multiplies by 1 + weight.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float,
        options: ModelOptions = PLAIN,
        *,
        bias: bool = False,
        zero_centered_gamma: bool = False,
    ):
        super().__init__()
        self.ops, self.eps, self.zero_centered_gamma = options.ops, eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(size, dtype=options.dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(size, dtype=options.dtype)) if bias else None
        )

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., H] -> [..., H]; with a residual the sum of both, which may overwrite hidden_states, and its norm."""
        form = self.weight, self.bias, self.eps, self.zero_centered_gamma
        # One module call either way: ZeRO 3 gathers the weight when a module is called.
        if residual is None:
            return self.ops.norm(hidden_states, *form)
        return self.ops.add_norm(hidden_states, residual, *form)


def build_norm(shape: ModelShape, options: ModelOptions = PLAIN) -> Norm:
    """The norm of the model's residual stream."""
    return Norm(
        shape.hidden_size,
        shape.rms_norm_eps,
        options,
        bias=shape.norm == "layer_norm",
        zero_centered_gamma=shape.zero_centered_gamma,
    )
