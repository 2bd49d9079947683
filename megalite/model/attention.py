"""Causal self-attention with grouped key-value heads."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.model.kv_cache import KeyValueCache
from megalite.model.norms import RMSNorm
from megalite.model.options import ModelOptions
from megalite.model.rope import Rotation
from megalite.ops.attention import causal_attention
from megalite.ops.rotary import rotate, split_and_rotate
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape

# From query, key and value to [B, S, heads, head_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class SelfAttention(nn.Module):
    """Query, key and value in one column-parallel product, heads split over tensor parallel ranks."""

    def __init__(self, shape: ModelShape, layer: int, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        self.fused_rotary = options.operators.uses("rotary")
        self.heads = mesh.local_heads(shape.num_attention_heads)
        self.key_value_heads = mesh.local_heads(shape.num_key_value_heads)
        rows = (self.heads + 2 * self.key_value_heads) * shape.head_dim
        self.qkv_proj = ColumnParallelLinear(
            shape.hidden_size,
            rows,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_bias,
            split_backward=options.split_backward,
        )
        self.o_proj = RowParallelLinear(
            self.heads * shape.head_dim,
            shape.hidden_size,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_output_bias,
        )
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            offset = shape.zero_centered_gamma
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps, options, offset=offset)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps, options, offset=offset)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
        attend: Attend = causal_attention,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]; with a cache, the S tokens follow those it holds."""
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        query, key, value = self._heads(qkv, rotation)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        return self.o_proj(attend(query, key, value).flatten(2))

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        if rotation is not None and not self.qk_norm:
            return split_and_rotate(
                qkv,
                self.heads,
                self.key_value_heads,
                *rotation,
                overwrite=not torch.is_grad_enabled(),  # nobody else holds the projection's output
                fused=self.fused_rotary,
            )
        query, key, value = qkv.split((self.heads, self.key_value_heads, self.key_value_heads), dim=2)
        if self.qk_norm:
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        if rotation is not None:
            query, key = rotate(query, key, *rotation, fused=self.fused_rotary)
        return query, key, value
