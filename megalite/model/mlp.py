"""The feed-forward block."""

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.model.options import ModelOptions
from megalite.ops.activations import swiglu
from megalite.ops.dropout import Mask, dropout
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import ModelShape


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one column-parallel product."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features = mesh.local(shape.intermediate_size)
        self.gate_up_proj = ColumnParallelLinear(
            shape.hidden_size,
            2 * features,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.mlp_bias,
            split_backward=options.split_backward,
        )
        self.down_proj = RowParallelLinear(
            features, shape.hidden_size, mesh=mesh, dtype=options.dtype, bias=shape.mlp_bias
        )

    def forward(self, hidden_states: Tensor, mask: Mask | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]; the mask is of the activations [B, S, intermediate / tp]."""
        return self.down_proj(dropout(swiglu(self.gate_up_proj(hidden_states)), mask))


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features = mesh.local(shape.intermediate_size)
        self.approximate = "tanh" if shape.hidden_act == "gelu_pytorch_tanh" else "none"
        self.up_proj = ColumnParallelLinear(
            shape.hidden_size,
            features,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.mlp_bias,
            split_backward=options.split_backward,
        )
        self.down_proj = RowParallelLinear(
            features, shape.hidden_size, mesh=mesh, dtype=options.dtype, bias=shape.mlp_bias
        )

    def forward(self, hidden_states: Tensor, mask: Mask | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]; the mask is of the activations [B, S, intermediate / tp]."""
        activated = F.gelu(self.up_proj(hidden_states), approximate=self.approximate)
        return self.down_proj(dropout(activated, mask))


def build_mlp(shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> GatedMLP | PlainMLP:
    """The feed-forward block of this shape."""
    kind = GatedMLP if shape.gated_mlp else PlainMLP
    return kind(shape, mesh, options)
