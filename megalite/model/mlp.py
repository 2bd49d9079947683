"""The feed-forward block."""

import torch
from torch import Tensor, nn

from megalite.ops.activations import swiglu
from megalite.ops.dropout import Mask, dropout
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import ModelShape


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one column-parallel product."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, *, dtype: torch.dtype):
        super().__init__()
        features = mesh.local(shape.intermediate_size)
        self.gate_up_proj = ColumnParallelLinear(shape.hidden_size, 2 * features, tp=mesh.tp, dtype=dtype)
        self.down_proj = RowParallelLinear(features, shape.hidden_size, tp=mesh.tp, dtype=dtype)

    def forward(self, hidden_states: Tensor, mask: Mask | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]; the mask is of the activations [B, S, intermediate / tp]."""
        return self.down_proj(dropout(swiglu(self.gate_up_proj(hidden_states)), mask))
