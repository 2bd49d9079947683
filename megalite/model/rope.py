"""Rotary position embedding: a table built once a stage, looked up once a micro batch."""

from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.ops.rotary import rotary_frequencies, rotary_table
from megalite.topology.parameters import ModelShape


class Rotation(NamedTuple):
    """The angles of one micro batch's positions, shared by all layers: [B or 1, S, 1, head_dim / 2] each."""

    cosines: Tensor
    sines: Tensor


class RotaryEmbedding(nn.Module):
    """Angles for positions up to `positions`, at the frequencies [head_dim / 2] given."""

    def __init__(self, positions: int, frequencies: Tensor, *, dtype: torch.dtype):
        super().__init__()
        self.cosines: Tensor
        self.sines: Tensor
        cosines, sines = rotary_table(positions, frequencies, dtype)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, position_ids: Tensor) -> Rotation:
        """position_ids: [B, S] -> the rotation of these positions."""
        return Rotation(self.cosines[position_ids].unsqueeze(2), self.sines[position_ids].unsqueeze(2))


def rotary_embedding(shape: ModelShape, dtype: torch.dtype = torch.float32) -> RotaryEmbedding:
    """The rotation of a model with rotary positions."""
    scaling = asdict(shape.rope_scaling) if shape.rope_scaling is not None else None
    frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, scaling)
    return RotaryEmbedding(shape.max_position_embeddings, frequencies, dtype=dtype)
