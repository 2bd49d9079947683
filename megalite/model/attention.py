"""Causal self-attention with grouped key-value heads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.model.kv_cache import KeyValueCache
from megalite.model.rope import Rotation
from megalite.ops.attention import causal_attention
from megalite.ops.rotary import split_and_rotate
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import ModelShape

# From query, key and value to [B, S, heads, head_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class SelfAttention(nn.Module):
    """Query, key and value in one column-parallel product, heads split over tensor parallel ranks."""

    def __init__(self, shape: ModelShape, layer: int, mesh: ParallelMesh, *, dtype: torch.dtype):
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        self.heads = mesh.local(shape.num_attention_heads)
        self.key_value_heads = mesh.local(shape.num_key_value_heads)
        rows = (self.heads + 2 * self.key_value_heads) * shape.head_dim
        self.qkv_proj = ColumnParallelLinear(shape.hidden_size, rows, tp=mesh.tp, dtype=dtype)
        self.o_proj = RowParallelLinear(
            self.heads * shape.head_dim, shape.hidden_size, tp=mesh.tp, dtype=dtype
        )

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation,
        cache: KeyValueCache | None = None,
        attend: Attend = causal_attention,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]; with a cache, the S tokens follow those it holds."""
        batch, sequence, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states).view(batch, sequence, -1, self.head_dim)
        query, key, value = split_and_rotate(qkv, self.heads, self.key_value_heads, *rotation)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        return self.o_proj(attend(query, key, value).flatten(2))
