"""From token ids to the hidden states of the first layer."""

import torch
from torch import Tensor, nn

from megalite.model.dropout import DropoutContext, DropoutSites
from megalite.model.options import ModelOptions
from megalite.ops.dropout import dropout
from megalite.parallel.layers import VocabParallelEmbedding
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.shape import ModelShape


class InputEmbedding(nn.Module):
    """The token table times its factors, plus learned positions where the model has them, after dropout.

    Its tables are the stage's own modules.
    """

    def __init__(
        self,
        shape: ModelShape,
        tokens: VocabParallelEmbedding,
        positions: nn.Embedding | None,
        mesh: ParallelMesh,
        options: ModelOptions,
    ):
        super().__init__()
        self.tokens, self.positions, self.mesh = tokens, positions, mesh
        self.scale = embedding_scale(shape, options.dtype)
        self.sites = DropoutSites(shape, "embedding", mesh, options)

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: DropoutContext | None) -> Tensor:
        """[B, S] twice -> [B, positions held here, H]."""
        embedded: Tensor = self.tokens(input_ids)
        if self.scale != 1:
            embedded = embedded * self.scale
        if self.positions is not None:
            positions = self.mesh.sequence_range(position_ids.shape[1])
            embedded = embedded.add_(self.positions(position_ids[:, positions.start : positions.stop]))
        return embedded if context is None else dropout(embedded, self.sites.embedding_mask(context))


def embedding_scale(shape: ModelShape, dtype: torch.dtype) -> float:
    """The factor of the token table: the square root of the hidden size rounded to `dtype` (Gemma), or the
    multiplier (Granite)."""
    if shape.embedding_scaled:
        return float(torch.tensor(shape.hidden_size**0.5).to(dtype)) * shape.embedding_multiplier
    return shape.embedding_multiplier
