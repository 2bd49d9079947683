"""The feed-forward block."""

from torch import Tensor, nn

from megalite.model.options import ModelOptions
from megalite.ops import liger
from megalite.ops.activations import Approximate, bias_gelu, geglu, swiglu
from megalite.ops.dropout import Mask, dropout
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one column-parallel product."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features = mesh.local(shape.intermediate_size)
        self.fused = options.operators.uses("glu")
        self.by_liger = options.operators.uses("glu", liger.LIGER) and not options.compile
        self.approximate = None if shape.hidden_act == "silu" else _approximate(shape)
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
        gate_up = self.gate_up_proj(hidden_states)
        if self.approximate is None and self.by_liger:
            activated = liger.swiglu(gate_up)
        elif self.approximate is None:
            activated = swiglu(gate_up, fused=self.fused)
        else:
            activated = geglu(gate_up, approximate=self.approximate, fused=self.fused)
        return self.down_proj(dropout(activated, mask))


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        features = mesh.local(shape.intermediate_size)
        self.approximate = _approximate(shape)
        self.fused, self.split_backward = options.operators.uses("bias_gelu"), options.split_backward
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
        # The activation's backward has the bias's gradient at hand; a split one asks for it at another time.
        apart = self.fused and not self.split_backward
        activated = bias_gelu(
            self.up_proj(hidden_states, with_bias=not apart),
            self.up_proj.bias if apart else None,
            approximate=self.approximate,
            fused=self.fused,
        )
        return self.down_proj(dropout(activated, mask))


def _approximate(shape: ModelShape) -> Approximate:
    return "tanh" if shape.hidden_act == "gelu_pytorch_tanh" else "none"


def build_mlp(shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> GatedMLP | PlainMLP:
    """The feed-forward block of this shape."""
    kind = GatedMLP if shape.gated_mlp else PlainMLP
    return kind(shape, mesh, options)
