"""From the hidden states of the last layer to logits and token losses."""

import torch
from torch import Tensor, nn

from megalite.model.norms import Norm
from megalite.model.options import ModelOptions
from megalite.ops.activations import soft_capped
from megalite.parallel.collectives import column_input, gather_last_dim
from megalite.parallel.cross_entropy import (
    ChunkedHead,
    LogitTransform,
    LossTerms,
    VocabularyShard,
    chunked_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megalite.parallel.layers import VocabParallelEmbedding, column_linear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape
from megalite.topology.stages import balanced_split


class Head(nn.Module):
    """The untied output projection: the rows of the vocabulary that this rank holds."""

    def __init__(self, rows: int, hidden_size: int, *, dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype)) if bias else None


class OutputHead(nn.Module):
    """The final norm, the projection to the vocabulary (tied or not) and the loss over it.

    Its modules are the stage's own.
    """

    def __init__(
        self,
        shape: ModelShape,
        norm: Norm,
        projection: Head | VocabParallelEmbedding,
        mesh: ParallelMesh,
        options: ModelOptions,
    ):
        super().__init__()
        self.norm, self.projection, self.mesh = norm, projection, mesh
        self.chunked_loss, self.gradients = options.model.chunked_loss, options.weight_gradients
        self.transform = LogitTransform(shape.final_logit_softcapping, shape.logits_scaling)
        self.vocabulary = balanced_split(shape.vocab_size, mesh.tp.size)
        self.shard = VocabularyShard(self.vocabulary[mesh.tp.rank], mesh.tp, options.ops.cross_entropy)
        self.loss_terms = LossTerms(
            shape.vocab_size, options.training.label_smoothing, options.training.z_loss
        )

    def losses(self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor, *, training: bool) -> Tensor:
        """[B, S, H] -> weighted losses [B, S]; label smoothing and z-loss are left out of an evaluation."""
        terms = self.loss_terms if training else LossTerms(self.loss_terms.vocabulary)
        if not self.chunked_loss:
            logits = self.local_logits(hidden_states)
            return vocab_parallel_cross_entropy(logits, labels, loss_mask, self.shard, terms)
        # Made here: ZeRO 3 gathers the weights for a forward.
        head = ChunkedHead(self.projection.weight, self._bias, self.chunked_loss, self.transform)
        inputs = column_input(self.norm(hidden_states), self.mesh)
        return chunked_cross_entropy(inputs, head, labels, loss_mask, self.shard, terms)

    def local_logits(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] -> logits over this rank's rows of the vocabulary [B, S, V / tp]."""
        logits = column_linear(
            self.norm(hidden_states),
            self.projection.weight,
            self._bias,
            mesh=self.mesh,
            gradients=self.gradients,
        )
        if self.transform.scaling != 1:
            logits = logits / self.transform.scaling
        return logits if self.transform.softcap is None else soft_capped(logits, self.transform.softcap)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] -> full logits [B, S, V], >= float32, on every tensor parallel rank; outside autograd."""
        sizes = tuple(len(rows) for rows in self.vocabulary)
        logits = gather_last_dim(self.local_logits(hidden_states), sizes, self.mesh.tp)
        return logits.float() if logits.element_size() < 4 else logits

    @property
    def _bias(self) -> Tensor | None:
        return self.projection.bias if isinstance(self.projection, Head) else None
