"""The decoder-only Transformer, from the embedding to the token losses.

A Stage registers every parameter of its pipeline rank by its canonical name; the Chunks it consists of are what a
schedule runs. One stage of one chunk is the whole model.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.model.context import EMPTY_CONTEXT, StepContext
from megalite.model.dropout import DropoutContext
from megalite.model.embedding import InputEmbedding
from megalite.model.head import Head, OutputHead
from megalite.model.layer import DecoderLayer
from megalite.model.norms import build_norm
from megalite.model.offload import ActivationOffload
from megalite.model.options import ModelOptions
from megalite.model.prefix import build_trunk
from megalite.model.rope import LayerRotations
from megalite.ops.documents import Documents, document_lengths
from megalite.ops.router import RealTokens
from megalite.parallel.context import ContextRows, rows_of
from megalite.parallel.layers import VocabParallelEmbedding
from megalite.parallel.lora_bank import Selection
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import TRAINING, ForwardMode, StepBatch
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit


class Decoder(nn.Module):
    """The modules under `model.` that this stage holds."""

    def __init__(self, shape: ModelShape, split: PipelineSplit, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        chunks = split.chunks_of(mesh.at.pp)
        first, last = 0 in chunks, len(split.layers) - 1 in chunks
        if first or (last and shape.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(
                shape.vocab_size,
                shape.hidden_size,
                mesh=mesh,
                dtype=options.dtype,
                gradients=options.weight_gradients,
            )
        if first and shape.position_embedding == "learned":
            # torch draws the values of an embedding that it makes itself.
            positions = torch.empty(shape.max_position_embeddings, shape.hidden_size, dtype=options.dtype)
            self.embed_positions = nn.Embedding.from_pretrained(positions, freeze=False)
        if (trunk := build_trunk(shape, options)) is not None:
            self.prefix = trunk
        # Keyed by the global index, so that a parameter has one name whatever stage holds it.
        self.layers = nn.ModuleDict()
        for layers in (split.layers[chunk] for chunk in chunks):
            for place, layer in enumerate(layers):
                recompute = options.recompute_of(place, len(layers))
                self.layers[str(layer)] = DecoderLayer(shape, layer, mesh, options, recompute=recompute)
        if last:
            self.norm = build_norm(shape, options)


class Chunk(nn.Module):
    """Consecutive layers of a stage, with the embedding before the first and the head after the last.

    The first chunk takes input_ids [B, S], the others hidden_states [B, S, H]; the last one returns each
    sequence's loss sum [B], the others hidden_states. Its modules are the stage's own. Where the mesh splits the
    sequence, hidden_states are of mesh.sequence_range(S) only.
    """

    def __init__(
        self, stage: "Stage", split: PipelineSplit, index: int, mesh: ParallelMesh, options: ModelOptions
    ):
        super().__init__()
        self.shape, self.index, self.mesh, self.ops = stage.shape, index, mesh, options.ops
        shape = stage.shape
        self.drops_attention, self.softcap = options.model.attention_dropout > 0, shape.attn_logit_softcapping
        self.is_first, self.is_last = index == 0, index == len(split.layers) - 1
        self.has_sinks = shape.attention_sinks
        self.prefix_tokens, self.trunk = shape.prefix_tokens, getattr(stage.model, "prefix", None)
        self.layers = nn.ModuleList(stage.model.layers[str(layer)] for layer in split.layers[index])
        self.offload = ActivationOffload() if options.training.offload_activations else None
        self.rotary = stage.rotary if shape.position_embedding == "rope" else None
        if self.is_first:
            positions = stage.model.embed_positions if shape.position_embedding == "learned" else None
            self.embedding = InputEmbedding(shape, stage.model.embed_tokens, positions, mesh, options)
        if self.is_last:
            projection = stage.model.embed_tokens if shape.tie_word_embeddings else stage.lm_head
            self.output = OutputHead(shape, stage.model.norm, projection, mesh, options)

    def forward(self, inputs: Tensor, *, batch: StepBatch, mode: ForwardMode = TRAINING) -> Tensor:
        """One micro batch, the same on every stage; as `parallel.context.cut` leaves it.

        mode: the only switch: `train` and `eval` of the module change nothing.
        """
        position_ids, document_ids = batch.position_ids, batch.document_ids
        rows = rows_of(batch, self.mesh)
        documents: Documents | None = None
        lengths: int | Tensor | None = None if rows is None else rows.length
        if document_ids is not None:
            if self.rotary is not None and self.rotary.full.follows_length:
                own = document_lengths(document_ids)
                lengths = own if rows is None else own.gather(1, rows.positions)
            if self.has_sinks or (rows is not None and self.mesh.context_method == "ring"):
                documents = self.ops.block_documents(document_ids, batch.cu_seqlens, batch.max_seqlen)
            else:
                documents = self.ops.documents(
                    document_ids,
                    batch.cu_seqlens,
                    max_seqlen=batch.max_seqlen,
                    dropout=mode.training and self.drops_attention,
                    softcap=self.softcap,
                    prefix=self._prefix_tokens(mode.adapters),
                )
        dropout = None
        if mode.training:
            positions = None if rows is None else rows.positions
            dropout = DropoutContext(batch.sample_indices, position_ids.shape[1], positions)
        context = StepContext(
            dropout=dropout,
            documents=documents,
            adapters=mode.adapters,
            rows=rows,
            router_scale=mode.router_scale,
            real_tokens=None if mode.router_scale is None else self._real_tokens(batch, rows),
        )
        hidden_states = self.decode(inputs, position_ids, context, lengths)
        if not self.is_last:
            return hidden_states
        losses = self.output.losses(hidden_states, batch.labels, batch.loss_mask, training=mode.training)
        return losses.sum(dim=-1)

    def _real_tokens(self, batch: StepBatch, rows: ContextRows | None) -> RealTokens | None:
        """Return which of this rank's positions outside of attention and MLP hold a token; None: all do."""
        if batch.lengths is None:
            return None
        own, device = self.mesh.sequence_range(batch.position_ids.shape[1]), batch.lengths.device
        if rows is None:
            places = torch.arange(own.start, own.stop, device=device).unsqueeze(0)
        else:
            places = rows.positions[:, own.start : own.stop]
        return RealTokens(places < batch.lengths.unsqueeze(1), batch.lengths)

    def decode(
        self,
        inputs: Tensor,
        position_ids: Tensor,
        context: StepContext = EMPTY_CONTEXT,
        lengths: int | Tensor | None = None,
    ) -> Tensor:
        """input_ids [B, S] for the first chunk, else hidden states [B, S, H] -> hidden states [B, S, H].

        context: without rotation and prefix, which this adds; with a cache the tokens are [1, T], those of the step.
        lengths: tokens of the sequence that each token belongs to, for rotary embeddings that depend on it; default:
        those of the cache, or S.
        """
        prefix_tokens, cache = self._prefix_tokens(context.adapters), context.cache
        if prefix_tokens:
            position_ids = position_ids + prefix_tokens
        rotation = None
        if self.rotary is not None:
            if lengths is None and cache is not None and self.rotary.full.follows_length:
                lengths = cache.on_device.sequence_lengths
            lengths = position_ids.shape[1] if lengths is None else lengths
            rotation = self.rotary(position_ids, prefix_tokens + lengths)
        prefix = self.trunk() if self.trunk is not None and prefix_tokens and context.begins else None
        context = replace(context, rotation=rotation, prefix_tokens=prefix_tokens, prefix=prefix)
        hidden_states = self.embedding(inputs, position_ids, context.dropout) if self.is_first else inputs
        if self.is_first and torch.is_grad_enabled() and not hidden_states.requires_grad:
            # A frozen embedding: recomputed layers and stages without a trained weight need a gradient to pass on.
            hidden_states.requires_grad_()
        graph = self.offload.graph() if self.offload is not None and torch.is_grad_enabled() else None
        for layer in self.layers:
            with nullcontext() if graph is None else graph.saving(layer):
                hidden_states = layer(hidden_states, context)
        if graph is not None:
            graph.end()
        return hidden_states

    def _prefix_tokens(self, adapters: Selection | None) -> int:
        """Return the virtual tokens in front of each sequence; a prefix is the model's own adapter."""
        return self.prefix_tokens if adapters is None else 0

    def normed(self, hidden_states: Tensor) -> Tensor:
        """Last chunk: [B, S, H] -> [B, S, H] after the final norm."""
        return self.output.norm(hidden_states)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Last chunk: [B, S, H] -> full logits [B, S, V], >= float32, on every tensor parallel rank; outside
        autograd."""
        return self.output.logits(hidden_states)


class Stage(nn.Module):
    """All that one pipeline rank holds. Callable, as its only chunk is, where there is one stage of one chunk."""

    def __init__(self, shape: ModelShape, split: PipelineSplit, mesh: ParallelMesh, options: ModelOptions):
        super().__init__()
        self.shape, self.dtype = shape, options.dtype
        chunks = split.chunks_of(mesh.at.pp)
        self.model = Decoder(shape, split, mesh, options)
        if len(split.layers) - 1 in chunks and not shape.tie_word_embeddings:
            rows = mesh.local(shape.vocab_size)
            self.lm_head = Head(rows, shape.hidden_size, dtype=options.dtype, bias=shape.head_bias)
        if shape.position_embedding == "rope":
            self.rotary = LayerRotations(shape, options.dtype)
        # A tuple, which torch does not register: a parameter has one name, the stage's.
        self.chunks = tuple(Chunk(self, split, index, mesh, options) for index in chunks)

    @property
    def whole(self) -> Chunk:
        """The only chunk: the whole model."""
        (chunk,) = self.chunks
        return chunk

    def forward(self, inputs: Tensor, **arguments: Any) -> Tensor:
        """Each sequence's loss sum [B] from input_ids [B, S]; arguments as for Chunk.forward."""
        losses: Tensor = self.whole(inputs, **arguments)
        return losses
