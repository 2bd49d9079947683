"""One decoder layer: attention and feed-forward with their norms, residual sums and dropout."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.attention import Attend, SelfAttention
from megalite.model.dropout import DropoutSites, LayerMasks, Places
from megalite.model.kv_cache import KeyValueCache
from megalite.model.mlp import build_mlp
from megalite.model.norms import build_norm
from megalite.model.options import PLAIN, ModelOptions, RecomputeMode
from megalite.model.recompute import recomputed
from megalite.model.rope import Rotation
from megalite.ops.attention import (
    causal_attention,
    fused_pays,
)
from megalite.ops.choice import COMPILED, PLAIN_TORCH, attention_operator
from megalite.ops.documents import Documents
from megalite.ops.dropout import CountedMask, Mask, dropout
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape

Stream = Tensor | tuple[Tensor, Tensor]
"""The residual stream between layers [B, S, H]: itself, or the two parts whose sum it is, which the next norm adds."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward with residual connections and norms before them (Touvron et al., "LLaMA", 2023), after
    the sums, or before and after them (Gemma team, "Gemma 2", 2024)."""

    def __init__(
        self,
        shape: ModelShape,
        layer: int,
        mesh: ParallelMesh,
        options: ModelOptions = PLAIN,
        *,
        recompute: RecomputeMode = "none",
    ):
        super().__init__()
        self.recompute, self.compile_layer = recompute, options.compile
        self.post_norm, self.sandwich = (shape.norm_placement == each for each in ("post", "sandwich"))
        self.leaves_sum_open = options.operators.uses("add_norm") and not (
            options.compile or self.post_norm or recompute == "full"
        )
        self.softcap, self.scale = shape.attn_logit_softcapping, shape.attention_scale
        # Compiled layers are torch's own fusion.
        self.operators = PLAIN_TORCH if options.compile else options.operators
        self.input_layernorm = build_norm(shape, options)
        self.self_attn = SelfAttention(shape, layer, mesh, options)
        self.post_attention_layernorm = build_norm(shape, options)
        if self.sandwich:
            self.pre_feedforward_layernorm = build_norm(shape, options)
            self.post_feedforward_layernorm = build_norm(shape, options)
        self.mlp = build_mlp(shape, mesh, options)
        self.window = shape.window_of(layer)
        self.sites = DropoutSites(shape, f"layers.{layer}", mesh, options)

    def forward(
        self,
        stream: Stream,
        rotation: Rotation | None,
        places: Places | None = None,
        cache: KeyValueCache | None = None,
        documents: Documents | None = None,
    ) -> Stream:
        """[B, S, H] -> [B, S, H], in two parts where the norms can add them; drops values where `places` are given."""
        run = partial(self._draw_and_run, rotation=rotation, places=places, cache=cache, documents=documents)
        return recomputed(run, closed(stream)) if self.recompute == "full" else run(stream)

    def _draw_and_run(
        self,
        stream: Stream,
        *,
        rotation: Rotation | None,
        places: Places | None,
        cache: KeyValueCache | None,
        documents: Documents | None,
    ) -> Any:
        """Masks are drawn outside of what is compiled, whose code is then the same for all layers."""
        masks, attend = LayerMasks(), None
        if self.recompute == "selective":
            attend = partial(recomputed, partial(self._draw_and_attend, places, documents))
        if places is not None:
            masks = self.sites.layer_masks(places, attention=attend is None)
        if self.compile_layer and isinstance(masks.attention, CountedMask) and places is not None:
            length = places.sequence_length
            masks = masks._replace(attention=masks.attention.draw(length, length))
        run = _compiled_layer() if self.compile_layer else DecoderLayer._run
        return run(self, stream, rotation, masks, cache, attend, documents)

    def _run(
        self,
        stream: Stream,
        rotation: Rotation | None,
        masks: LayerMasks,
        cache: KeyValueCache | None,
        attend: Attend | None,
        documents: Documents | None,
    ) -> Stream:
        attend = attend or partial(self._attend, masks.attention, documents)
        # Sums in place on the projections' outputs, which no backward needs.
        if isinstance(stream, tuple):
            stream, normed = self.input_layernorm(*stream)
        else:
            normed = stream if self.post_norm else self.input_layernorm(stream)
        attended = self.self_attn(normed, rotation, cache, attend)
        if self.sandwich:
            attended = self.post_attention_layernorm(attended)
        attended = dropout(attended, masks.attention_residual)
        norm = self.input_layernorm if self.post_norm else self.post_attention_layernorm
        attended, normed = (self.pre_feedforward_layernorm if self.sandwich else norm)(attended, stream)
        output: Tensor = self.mlp(normed, masks.mlp)
        if self.sandwich:
            output = self.post_feedforward_layernorm(output)
        output = dropout(output, masks.mlp_residual)
        if self.post_norm:
            output = self.post_attention_layernorm(output, normed)[1]
            return output
        return (output, attended) if self.leaves_sum_open else output.add_(attended)

    def _draw_and_attend(
        self, places: Places | None, documents: Documents | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        mask = None if places is None else self.sites.attention_mask(places)
        return self._attend(mask, documents, query, key, value)

    def _attend(
        self,
        mask: Mask | CountedMask | None,
        documents: Documents | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        operator = attention_operator(
            dropout=mask is not None,
            softcap=self.softcap is not None,
            documents=documents is not None,
            window=self.window is not None,
        )
        chosen = self.operators.of(operator)
        capable = self.softcap is None and chosen == COMPILED
        fused = capable and fused_pays(query, key, self.window, documents, mask)
        return causal_attention(
            query,
            key,
            value,
            window=self.window,
            mask=mask,
            documents=documents,
            scale=self.scale,
            softcap=self.softcap,
            fused=fused,
            prefer=chosen,
        )


def closed(stream: Stream) -> Tensor:
    """The sum; in place on the first part, an output of a projection that no backward needs."""
    return stream[0].add_(stream[1]) if isinstance(stream, tuple) else stream


@cache
def _compiled_layer() -> Callable[..., Stream]:
    """One compiled function for all layers of a process; whatever it could not trace is an error, not a break."""
    compiled: Callable[..., Stream] = torch.compile(DecoderLayer._run, fullgraph=True)
    return compiled
