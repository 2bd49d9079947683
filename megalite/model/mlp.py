"""The feed-forward block."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.model.context import StepContext
from megalite.model.dropout import LayerMasks
from megalite.model.options import ModelOptions
from megalite.ops.activations import Approximate
from megalite.ops.dropout import dropout
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one column-parallel product."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features, ops = mesh.local(shape.intermediate_size), options.ops
        gelu = partial(ops.glu.geglu, approximate=_approximate(shape))
        self.activation = ops.glu.swiglu if shape.hidden_act == "silu" else gelu
        arguments = _linear_arguments(shape, mesh, options)
        self.gate_up_proj = ColumnParallelLinear(shape.hidden_size, 2 * features, **arguments)
        self.down_proj = RowParallelLinear(features, shape.hidden_size, **arguments)

    def forward(self, hidden_states: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        activated = self.activation(self.gate_up_proj(hidden_states, masks.adapter_up, context.adapters))
        return self.down_proj(dropout(activated, masks.mlp), masks.adapter_down, context.adapters)


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features, self.bias_gelu = mesh.local(shape.intermediate_size), options.ops.bias_gelu
        self.approximate = _approximate(shape)
        arguments = _linear_arguments(shape, mesh, options)
        self.up_proj = ColumnParallelLinear(shape.hidden_size, features, **arguments)
        self.down_proj = RowParallelLinear(features, shape.hidden_size, **arguments)

    def forward(self, hidden_states: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        with_gelu = self.bias_gelu.adds_bias
        activated = self.bias_gelu.activate(
            self.up_proj(hidden_states, masks.adapter_up, context.adapters, with_bias=not with_gelu),
            self.up_proj.bias if with_gelu else None,
            approximate=self.approximate,
        )
        return self.down_proj(dropout(activated, masks.mlp), masks.adapter_down, context.adapters)


def _linear_arguments(shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> dict[str, Any]:
    """Return the arguments that both linears of a block share."""
    gradients = options.weight_gradients
    return {"mesh": mesh, "dtype": options.dtype, "bias": shape.mlp_bias, "gradients": gradients}


def _approximate(shape: ModelShape) -> Approximate:
    return "tanh" if shape.hidden_act == "gelu_pytorch_tanh" else "none"


def build_mlp(shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> GatedMLP | PlainMLP:
    """Return the feed-forward block that all tokens share."""
    kind = GatedMLP if shape.gated_mlp else PlainMLP
    return kind(shape, mesh, options)
