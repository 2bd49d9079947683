"""The decoder-only Transformer, from the embedding to the token losses; a stage holds some or all of it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalite.model.attention import SelfAttention
from megalite.model.kv_cache import KeyValueCache
from megalite.model.mlp import GatedMLP
from megalite.model.norms import RMSNorm
from megalite.model.rope import RotaryEmbedding, Rotation
from megalite.parallel.collectives import copy_to, gather_last_dim
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.layers import VocabParallelEmbedding
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.layout import balanced_split
from megalite.topology.parameters import ModelShape


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residual connections (Touvron et al., "LLaMA", 2023)."""

    def __init__(
        self, shape: ModelShape, layer: int, mesh: ParallelMesh, *, dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, dtype=dtype)
        self.self_attn = SelfAttention(shape, layer, mesh, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(shape, mesh, dtype=dtype)

    def forward(
        self, hidden_states: Tensor, rotation: Rotation, cache: KeyValueCache | None = None
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        # In place on the projections' outputs, which no backward needs.
        attended = self.self_attn(self.input_layernorm(hidden_states), rotation, cache).add_(hidden_states)
        return self.mlp(self.post_attention_layernorm(attended)).add_(attended)


class Decoder(nn.Module):
    """What stands under `model.` in every parameter's name: embedding, layers and final norm, as far as held."""

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[int],
        mesh: ParallelMesh,
        *,
        ends: tuple[bool, bool],
        dtype: torch.dtype,
    ):
        super().__init__()
        first, last = ends
        if first or (last and shape.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(
                shape.vocab_size, shape.hidden_size, tp=mesh.tp, dtype=dtype
            )
        # Keyed by the global index, so that a parameter has one name whatever stage holds it.
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(shape, layer, mesh, dtype=dtype) for layer in layers}
        )
        if last:
            self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, dtype=dtype)


class Head(nn.Module):
    """The untied output projection: the rows of the vocabulary that this rank holds."""

    def __init__(self, rows: int, hidden_size: int, *, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype))


class Stage(nn.Module):
    """A pipeline stage: the whole model where there is one stage.

    The first stage takes input_ids [B, S], the others hidden_states [B, S, H]; the last one returns each
    sequence's loss sum [B], the others hidden_states.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[int],
        mesh: ParallelMesh,
        *,
        ends: tuple[bool, bool],
        dtype: torch.dtype,
    ):
        super().__init__()
        self.shape, self.tp = shape, mesh.tp
        self.is_first, self.is_last = ends
        self.rows = balanced_split(shape.vocab_size, mesh.tp.size)[mesh.tp.rank]
        self.model = Decoder(shape, layers, mesh, ends=ends, dtype=dtype)
        if self.is_last and not shape.tie_word_embeddings:
            self.lm_head = Head(len(self.rows), shape.hidden_size, dtype=dtype)
        self.rotary = RotaryEmbedding(
            shape.max_position_embeddings, shape.head_dim, shape.rope_theta, dtype=dtype
        )

    @property
    def head_weight(self) -> Tensor:
        """The output projection on the last stage: [rows of this rank, H]."""
        tied = self.shape.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def forward(self, inputs: Tensor, *, position_ids: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """One micro batch; position_ids, labels and loss_mask are [B, S] on every stage."""
        hidden_states = self.decode(inputs, position_ids)
        if not self.is_last:
            return hidden_states
        losses = vocab_parallel_cross_entropy(
            self.local_logits(hidden_states), labels, loss_mask, self.rows, self.tp
        )
        return losses.sum(dim=-1)

    def decode(self, inputs: Tensor, position_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """input_ids [B, S] on the first stage, else hidden states [B, S, H] -> hidden states [B, S, H]."""
        hidden_states = self.model.embed_tokens(inputs) if self.is_first else inputs
        rotation = self.rotary(position_ids)
        for layer in self.model.layers.values():
            hidden_states = layer(hidden_states, rotation, cache)
        return hidden_states

    def local_logits(self, hidden_states: Tensor) -> Tensor:
        """Last stage: [B, S, H] -> logits over this rank's rows of the vocabulary [B, S, V / tp]."""
        return torch.nn.functional.linear(copy_to(self.model.norm(hidden_states), self.tp), self.head_weight)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Last stage: [B, S, H] -> full logits [B, S, V] on every tensor parallel rank; outside autograd."""
        sizes = tuple(len(rows) for rows in balanced_split(self.shape.vocab_size, self.tp.size))
        return gather_last_dim(self.local_logits(hidden_states), sizes, self.tp)
