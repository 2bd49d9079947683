"""The decoder-only Transformer, from the embedding to the token losses.

A Stage registers every parameter of its pipeline rank by its canonical name; the Chunks it consists of are what a
schedule runs. One stage of one chunk is the whole model.
"""

from typing import Self

import torch
from torch import Tensor, nn

from megalite.model.dropout import DropoutSites, Places
from megalite.model.head import Head
from megalite.model.kv_cache import KeyValueCache
from megalite.model.layer import DecoderLayer, Stream, closed
from megalite.model.norms import build_norm
from megalite.model.options import ModelOptions
from megalite.model.rope import LayerRotations
from megalite.ops.attention import (
    document_spans,
    document_starts,
    documents_seen,
)
from megalite.ops.choice import PLAIN_TORCH
from megalite.ops.documents import Documents, starts_of_rows
from megalite.ops.dropout import dropout
from megalite.ops.softcap import soft_capped
from megalite.parallel.collectives import column_input, gather_last_dim
from megalite.parallel.cross_entropy import LossTerms, chunked_cross_entropy, vocab_parallel_cross_entropy
from megalite.parallel.layers import VocabParallelEmbedding, column_linear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit, balanced_split


class Decoder(nn.Module):
    """What stands under `model.` in every parameter's name, as far as this stage holds it."""

    def __init__(self, shape: ModelShape, split: PipelineSplit, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        chunks = split.chunks_of(mesh.at.pp)
        first, last = 0 in chunks, len(split.layers) - 1 in chunks
        if first or (last and shape.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(
                shape.vocab_size, shape.hidden_size, mesh=mesh, dtype=options.dtype
            )
        if first and shape.position_embedding == "learned":
            self.embed_positions = nn.Embedding(
                shape.max_position_embeddings, shape.hidden_size, dtype=options.dtype
            )
        # Keyed by the global index, so that a parameter has one name whatever stage holds it.
        self.layers = nn.ModuleDict()
        for layers in (split.layers[chunk] for chunk in chunks):
            for place, layer in enumerate(layers):
                recompute = options.recompute.of_layer(place, len(layers))
                self.layers[str(layer)] = DecoderLayer(shape, layer, mesh, options, recompute=recompute)
        if last:
            self.norm = build_norm(shape, options)


class Chunk(nn.Module):
    """A run of consecutive layers of a stage, with the embedding before the first and the head after the last.

    The first chunk takes input_ids [B, S], the others hidden_states [B, S, H]; the last one returns each
    sequence's loss sum [B], the others hidden_states. Its modules are the stage's own. Where the mesh splits the
    sequence, hidden_states are of mesh.sequence_range(S) only.
    """

    def __init__(
        self, stage: "Stage", split: PipelineSplit, index: int, mesh: ParallelMesh, options: ModelOptions
    ):
        super().__init__()
        self.index, self.mesh, self.tp = index, mesh, mesh.tp
        self.split_backward = options.split_backward
        self.compiled, self.drops_attention = options.compile, options.dropout.attention > 0
        self.chunked_loss, self.fused_loss = options.chunked_loss, options.operators.uses("cross_entropy")
        self.softcap = stage.shape.final_logit_softcapping
        self.operators = PLAIN_TORCH if stage.shape.attn_logit_softcapping else options.operators
        self.embedding_scale = embedding_scale(stage.shape, options.dtype)
        self.is_first, self.is_last = index == 0, index == len(split.layers) - 1
        self.vocabulary = balanced_split(stage.shape.vocab_size, mesh.tp.size)
        self.loss_terms = LossTerms(stage.shape.vocab_size, options.label_smoothing, options.z_loss)
        self.layers = nn.ModuleList(stage.model.layers[str(layer)] for layer in split.layers[index])
        self.learned_positions = stage.shape.position_embedding == "learned"
        if not self.learned_positions:
            self.rotary = stage.rotary
        if self.is_first:
            self.embed_tokens = stage.model.embed_tokens
            if self.learned_positions:
                self.embed_positions = stage.model.embed_positions
            self.sites = DropoutSites(stage.shape, "embedding", mesh, options)
        if self.is_last:
            self.norm = stage.model.norm
            self.head = stage.model.embed_tokens if stage.shape.tie_word_embeddings else stage.lm_head

    def forward(
        self,
        inputs: Tensor,
        *,
        position_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        samples: Tensor,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        each_token: bool = False,
    ) -> Tensor:
        """One micro batch; position_ids, labels and loss_mask are [B, S] on every stage, samples [B].

        document_ids: [B, S], ascending in a row; given, a token attends to those of its own document only.
        cu_seqlens: the same documents as of StepBatch, without which an accelerator has the host wait for the ids.
        each_token: the last chunk returns the losses [B, S] themselves.
        """
        places = Places(samples, position_ids.shape[1]) if self.training else None
        documents = None if document_ids is None else self._documents(document_ids, cu_seqlens)
        hidden_states = self.decode(inputs, position_ids, places, documents=documents)
        if not self.is_last:
            return hidden_states
        losses = self._token_losses(hidden_states, labels, loss_mask)
        return losses if each_token else losses.sum(dim=-1)

    def decode(
        self,
        inputs: Tensor,
        position_ids: Tensor,
        places: Places | None = None,
        cache: KeyValueCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """input_ids [B, S] for the first chunk, else hidden states [B, S, H] -> hidden states [B, S, H].

        places: given, values are dropped as the options say.
        """
        hidden_states = inputs
        if self.is_first:
            hidden_states = self._embed(inputs, position_ids)
            if places is not None:
                hidden_states = dropout(hidden_states, self.sites.embedding_mask(places))
        rotations = None if self.learned_positions else self.rotary(position_ids)
        stream: Stream = hidden_states
        for layer in self.layers:
            rotation = None if rotations is None else rotations.of(layer.window)
            stream = layer(stream, rotation, places, cache, documents)
        return closed(stream)

    def _documents(self, document_ids: Tensor, cu_seqlens: Tensor | None) -> Documents:
        """Once a micro batch, for all layers. Compiled code and probabilities written out want one shape."""
        drops = self.training and self.drops_attention
        if document_ids.device.type != "cpu":
            if cu_seqlens is None:
                return document_starts(document_ids)
            return starts_of_rows(cu_seqlens, document_ids.shape[1])
        fused = self.operators.uses("attention_dropout" if drops else "attention_documents")
        if fused and not self.compiled:
            return document_starts(document_ids)
        if self.compiled or drops:
            return documents_seen(document_ids)
        return document_spans(document_ids)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1:
            embedded = embedded * self.embedding_scale
        if not self.learned_positions:
            return embedded
        held = self.mesh.sequence_range(position_ids.shape[1])
        return embedded.add_(self.embed_positions(position_ids[:, held.start : held.stop]))

    def _token_losses(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """Last chunk: [B, S, H] -> weighted losses [B, S]."""
        # What shapes the training is no part of an evaluation's loss.
        terms = self.loss_terms if self.training else LossTerms(self.loss_terms.vocabulary)
        tokens = (labels, loss_mask, self.vocabulary[self.tp.rank], self.tp, terms)
        if not self.chunked_loss:
            return vocab_parallel_cross_entropy(
                self.local_logits(hidden_states), *tokens, fused=self.fused_loss
            )
        inputs = column_input(self.norm(hidden_states), self.mesh)
        return chunked_cross_entropy(
            inputs,
            self.head.weight,
            *tokens,
            chunk_tokens=self.chunked_loss,
            softcap=self.softcap,
            fused=self.fused_loss,
        )

    def local_logits(self, hidden_states: Tensor) -> Tensor:
        """Last chunk: [B, S, H] -> logits over this rank's rows of the vocabulary [B, S, V / tp]."""
        normed, split_backward = self.norm(hidden_states), self.split_backward
        logits = column_linear(normed, self.head.weight, mesh=self.mesh, split_backward=split_backward)
        return logits if self.softcap is None else soft_capped(logits, self.softcap)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Last chunk: [B, S, H] -> full logits [B, S, V], >= float32, on every tensor parallel rank; outside
        autograd."""
        sizes = tuple(len(rows) for rows in self.vocabulary)
        logits = gather_last_dim(self.local_logits(hidden_states), sizes, self.tp)
        return logits.float() if logits.element_size() < 4 else logits


def embedding_scale(shape: ModelShape, dtype: torch.dtype) -> float:
    """What the embedding is multiplied by, as transformers rounds it."""
    return float(torch.tensor(shape.hidden_size**0.5).to(dtype)) if shape.embedding_scaled else 1.0


class Stage(nn.Module):
    """All that one pipeline rank holds. Callable, as its only chunk is, where there is one stage of one chunk."""

    def __init__(self, shape: ModelShape, split: PipelineSplit, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        self.shape, self.dtype = shape, options.dtype
        chunks = split.chunks_of(mesh.at.pp)
        self.model = Decoder(shape, split, mesh, options)
        if len(split.layers) - 1 in chunks and not shape.tie_word_embeddings:
            rows = len(balanced_split(shape.vocab_size, mesh.tp.size)[mesh.tp.rank])
            self.lm_head = Head(rows, shape.hidden_size, dtype=options.dtype)
        if shape.position_embedding == "rope":
            self.rotary = LayerRotations(shape, options.dtype)
        # A tuple, which torch does not register: a parameter has one name, the stage's.
        self.chunks = tuple(Chunk(self, split, index, mesh, options) for index in chunks)

    def train(self, mode: bool = True) -> Self:
        for chunk in self.chunks:
            chunk.training = mode
        return super().train(mode)

    @property
    def whole(self) -> Chunk:
        """The only chunk: the whole model."""
        (chunk,) = self.chunks
        return chunk

    def forward(self, inputs: Tensor, **arguments: Tensor) -> Tensor:
        """Each sequence's loss sum [B] from input_ids [B, S]; arguments as for Chunk.forward."""
        losses: Tensor = self.whole(inputs, **arguments)
        return losses
