"""Causal self-attention with grouped key-value heads."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megalite.model.context import StepContext
from megalite.model.dropout import LayerMasks
from megalite.model.kv_cache import CachedStep, PromptSegment
from megalite.model.norms import Norm
from megalite.model.options import ModelOptions
from megalite.model.prefix import LayerPrefix, in_front
from megalite.model.recompute import recomputed
from megalite.ops.attention_form import AttentionForm
from megalite.ops.rotary import Rotation
from megalite.parallel.context_attention import METHODS
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.norms import HeadShardedNorm
from megalite.topology.adapter import Prefix
from megalite.topology.shape import ModelShape


class SelfAttention(nn.Module):
    """Query, key and value in one column-parallel product, heads split over tensor parallel ranks.

    recompute: backward computes attention again from query, key and value.
    """

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(
        self, shape: ModelShape, layer: int, mesh: ParallelMesh, options: ModelOptions, *, recompute: bool
    ):
        super().__init__()
        self.layer, self.head_dim, self.recompute = layer, shape.head_dim, recompute
        self.ops, self.rotary = options.ops, options.ops.rotary
        self.over_context = METHODS[mesh.context_method]
        self.window, self.rotates = shape.window_of(layer), shape.rotates(layer)
        self.scale, self.softcap = shape.attention_scale, shape.attn_logit_softcapping
        self.heads = mesh.local_heads(shape.num_attention_heads)
        self.key_value_heads = mesh.local_heads(shape.num_key_value_heads)
        sinks = torch.empty(self.heads, dtype=options.dtype) if shape.attention_sinks else None
        self.sinks = None if sinks is None else nn.Parameter(sinks)
        if isinstance(shape.adapter, Prefix):
            self.prefix = LayerPrefix(shape.adapter, self.key_value_heads, shape.head_dim, options)
        self.add_projections(shape, mesh, options)

    def add_projections(self, shape: ModelShape, mesh: ParallelMesh, options: ModelOptions) -> None:
        """Register the linears and norms, in the order of use."""
        rows = (self.heads + 2 * self.key_value_heads) * shape.head_dim
        self.qkv_proj = ColumnParallelLinear(
            shape.hidden_size,
            rows,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_bias,
            gradients=options.weight_gradients,
        )
        self.o_proj = RowParallelLinear(
            self.heads * shape.head_dim,
            shape.hidden_size,
            mesh=mesh,
            dtype=options.dtype,
            bias=shape.attention_output_bias,
            gradients=options.weight_gradients,
        )
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = _query_key_norm(shape, shape.num_attention_heads, mesh, options)
            self.k_norm = _query_key_norm(shape, shape.num_key_value_heads, mesh, options)

    def forward(self, hidden_states: Tensor, context: StepContext, masks: LayerMasks) -> Tensor:
        """[B, S, H] -> [B, S, H], where rows are cut S / c of them; with a cache [1, T, H], those of a CachedStep."""
        rotated = context.rotation is not None and self.rotates
        rotation = context.rotation.of(self.window) if context.rotation is not None and rotated else None
        query, key, value = self.project(hidden_states, rotation, context, masks)
        # Behind the projection, so that backward has the prefix's gradients before that of the layer's input.
        prefix = self.prefix(context.prefix) if context.prefix_tokens and context.begins else None
        mask = None if context.cache is not None else masks.attention
        form = AttentionForm(
            self.window, context.documents, mask, self.scale, self.softcap, context.prefix_tokens, self.sinks
        )
        if context.cache is not None:
            attended = self._attend_cached(context.cache, form, (query, key, value), prefix)
            return self.o_proj(self.joined(attended), masks.adapter_o, context.adapters)
        attend = partial(self._attend, form)
        if context.rows is not None:
            rows = context.rows if prefix is None else replace(context.rows, prefix=prefix)
            attend = partial(self.over_context, self.ops, form=form, rows=rows)
        elif prefix is not None:
            key, value = in_front(prefix, key, value)
        attended = recomputed(attend, query, key, value) if self.recompute else attend(query, key, value)
        return self.o_proj(self.joined(attended), masks.adapter_o, context.adapters)

    def project(
        self, hidden_states: Tensor, rotation: Rotation | None, context: StepContext, masks: LayerMasks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of this rank's heads [B, S, heads, head_dim], rotated."""
        qkv = self.qkv_proj(hidden_states, masks.adapter_qkv, context.adapters)
        return self._heads(qkv.unflatten(-1, (-1, self.head_dim)), rotation)

    def joined(self, attended: Tensor) -> Tensor:
        """Return the heads [B, S, heads, head_dim] as the input [B, S, ...] of the output projection."""
        return attended.flatten(2)

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        if rotation is not None and not self.qk_norm:
            # Nothing else holds the projection's output, which may be rotated in place without gradients.
            overwrite = not torch.is_grad_enabled()
            return self.rotary.split_and_rotate(
                qkv, self.heads, self.key_value_heads, rotation, overwrite=overwrite
            )
        query, key, value = qkv.split((self.heads, self.key_value_heads, self.key_value_heads), dim=2)
        if self.qk_norm:
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        if rotation is not None:
            query, key = self.rotary.rotate(query, key, rotation)
        return query, key, value

    def _attend(self, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.ops.attend(query, key, value, form)

    def _attend_cached(
        self,
        step: CachedStep,
        form: AttentionForm,
        heads: tuple[Tensor, Tensor, Tensor],
        prefix: Tensor | None,
    ) -> Tensor:
        """Attend from the T tokens of a step to those of their own request: [1, T, heads, head_dim].

        heads: query, key and value [1, T, heads, head_dim]. prefix: keys and values of the virtual tokens.
        """
        query, key, value = heads
        place, attended = len(step.lengths), []
        if place:
            of_cache = form._replace(documents=None, mask=None, prefix=step.cache.prefix)
            decoded = self.attend_decoded(step, of_cache, query[0, :place], key[0, :place], value[0, :place])
            attended.append(decoded.unsqueeze(0))
        for segment in step.segments:
            span = slice(place, place + segment.computed)
            keys, values = self.extend_segment(step, segment, key[0, span], value[0, span], prefix)
            before = keys.shape[1] - segment.count
            for block in segment.own:
                part, end = slice(place, place + len(block)), before + block.stop
                attended.append(self._attend(form, query[:, part], keys[:, :end], values[:, :end]))
                place = part.stop
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)

    def attend_decoded(
        self, step: CachedStep, form: AttentionForm, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """As of CachedStep, in this layer."""
        return step.attend_decoded(self.layer, query, key, value, form)

    def extend_segment(
        self, step: CachedStep, segment: PromptSegment, key: Tensor, value: Tensor, prefix: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As of CachedStep, in this layer."""
        return step.extend_segment(self.layer, segment, key, value, prefix)


def _query_key_norm(shape: ModelShape, heads: int, mesh: ParallelMesh, options: ModelOptions) -> nn.Module:
    """The norm of query or key [B, S, heads here, head_dim], over each head or over all heads of all ranks."""
    if shape.qk_norm == "head":
        return Norm(
            shape.head_dim, shape.rms_norm_eps, options, zero_centered_gamma=shape.zero_centered_gamma
        )
    return HeadShardedNorm(shape, heads, mesh=mesh, dtype=options.dtype, ops=options.ops)
