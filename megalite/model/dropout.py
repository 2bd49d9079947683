"""Where dropout is applied, and the masks there: a function of seed, site, sample and position, never of the layout."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.model.options import ModelOptions
from megalite.ops.counter import MASK_LEVELS
from megalite.ops.dropout import CountedMask, Mask
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.random import keep_mask, key_of
from megalite.topology.shape import ModelShape
from megalite.topology.stages import balanced_split


class DropoutContext(NamedTuple):
    """The counters of one micro batch's masks, the same in any layout: global sample numbers [b], positions a sample.

    A position is the index in the row: position_ids start again with every document.
    positions: those of the tokens [b, sequence_length], where other ranks have the rest of the row; None: all in order.
    """

    sample_indices: Tensor
    sequence_length: int
    positions: Tensor | None = None

    def of(self, tokens: range) -> range | Tensor:
        """Return the positions of a range of the tokens."""
        return tokens if self.positions is None else self.positions[:, tokens.start : tokens.stop]


class LayerMasks(NamedTuple):
    """A decoder layer's masks, each None where nothing is dropped.

    adapter_qkv, adapter_o, adapter_up, adapter_down: of what the adapters of these linears read.
    """

    attention: Mask | CountedMask | None = None
    attention_residual: Mask | None = None
    mlp: Mask | None = None
    mlp_residual: Mask | None = None
    adapter_qkv: Mask | None = None
    adapter_o: Mask | None = None
    adapter_up: Mask | None = None
    adapter_down: Mask | None = None


NO_MASKS = LayerMasks()


class DropoutSites:
    """Where this rank drops values in one decoder layer, or of the embedding."""

    def __init__(self, shape: ModelShape, name: str, mesh: ParallelMesh, options: ModelOptions):
        self._name, self._mesh = name, mesh
        # Kept as numbers, so that a compiled layer reads no section.
        self._seed, model = options.dropout_seed, options.model
        self._embedding_rate, self._residual_rate = model.embedding_dropout, model.residual_dropout
        self._mlp_rate, self._attention_rate = model.mlp_dropout, model.attention_dropout
        self._adapter_rate = options.adapter.dropout
        self._hidden = range(shape.hidden_size)
        self._intermediate = balanced_split(shape.intermediate_size, mesh.tp.size)[mesh.tp.rank]
        self._heads = balanced_split(shape.num_attention_heads, mesh.tp.size)[mesh.tp.rank]
        self._attended = range(self._heads.start * shape.head_dim, self._heads.stop * shape.head_dim)

    def embedding_mask(self, context: DropoutContext) -> Mask | None:
        """[b, positions held here, H]."""
        return self._residual("output", self._embedding_rate, context)

    def layer_masks(self, context: DropoutContext, *, with_mlp: bool = True) -> LayerMasks:
        """On the residual stream [b, positions held here, H], within the MLP [b, S, intermediate / tp]; attention's is
        drawn where it is used. S: this rank's tokens of the row. with_mlp: with the masks of `mlp_masks`."""
        everywhere = [range(context.sequence_length)]
        masks = LayerMasks(
            attention=self.attention_mask(context),
            attention_residual=self._residual("attention_residual", self._residual_rate, context),
            mlp_residual=self._residual("mlp_residual", self._residual_rate, context),
            adapter_qkv=self._residual("adapter_qkv", self._adapter_rate, context),
            adapter_o=self._mask("adapter_o", self._adapter_rate, context, everywhere, self._attended),
        )
        return self.mlp_masks(context, slice(None), masks) if with_mlp else masks

    def mlp_masks(self, context: DropoutContext, held: slice, others: LayerMasks = NO_MASKS) -> LayerMasks:
        """Return `others` with the masks inside the MLP for some of the tokens held here.

        They are [b, tokens, H] for the adapters' input, [b, tokens of all tp ranks, intermediate / tp] behind it.
        """
        length = context.sequence_length
        here = self._mesh.sequence_range(length)
        # The MLP gathers the tokens of each rank in their order.
        ranks = [range(start, start + len(here))[held] for start in range(0, length, len(here))]
        return others._replace(
            mlp=self._mask("mlp", self._mlp_rate, context, ranks, self._intermediate),
            adapter_up=self._mask("adapter_up", self._adapter_rate, context, [here[held]], self._hidden),
            adapter_down=self._mask("adapter_down", self._adapter_rate, context, ranks, self._intermediate),
        )

    def attention_mask(self, context: DropoutContext) -> CountedMask | None:
        """Return the mask of the probabilities [b, heads of this rank, S queries, S keys]."""
        if self._attention_rate == 0:
            return None
        key = key_of(self._seed, self._key_name("attention"))
        return CountedMask(key, context.sample_indices, self._heads, dropped_levels(self._attention_rate))

    def _residual(self, site: str, rate: float, context: DropoutContext) -> Mask | None:
        tokens = [self._mesh.sequence_range(context.sequence_length)]
        return self._mask(site, rate, context, tokens, self._hidden)

    def _mask(
        self, site: str, rate: float, context: DropoutContext, tokens: Sequence[range], features: range
    ) -> Mask | None:
        if rate == 0:
            return None
        dropped, name = dropped_levels(rate), self._key_name(site)
        samples = context.sample_indices
        kept = [
            keep_mask(self._seed, name, samples, context.of(span), features, dropped=dropped)
            for span in tokens
        ]
        keep = kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
        return Mask(keep, MASK_LEVELS / (MASK_LEVELS - dropped))

    def _key_name(self, site: str) -> str:
        return f"dropout.{self._name}.{site}"


def dropped_levels(rate: float) -> int:
    """The multiple of 1 / MASK_LEVELS nearest to a rate in (0, 1), itself neither 0 nor 1."""
    return min(max(round(rate * MASK_LEVELS), 1), MASK_LEVELS - 1)
