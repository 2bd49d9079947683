"""Rotary position embedding: tables built once a stage, looked up once a micro batch."""

from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.ops.rotary import rotary_frequencies, rotary_table
from megalite.topology.shape import ModelShape


class Rotation(NamedTuple):
    """The angles of one micro batch's positions: [B or 1, S, 1, head_dim / 2] each."""

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


class Rotations(NamedTuple):
    """Of one micro batch, shared by all layers without a window and by all with one."""

    full: Rotation
    local: Rotation

    def of(self, window: int | None) -> Rotation:
        """For a layer with this window."""
        return self.full if window is None else self.local


class LayerRotations(nn.Module):
    """The rotations of all layers of a model with rotary positions."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.full = rotary_embedding(shape, dtype)
        self.local: RotaryEmbedding | None = None
        if shape.rope_local_base_freq is not None:
            local = replace(shape, rope_theta=shape.rope_local_base_freq, rope_scaling=None)
            self.local = rotary_embedding(local, dtype)

    def forward(self, position_ids: Tensor) -> Rotations:
        """position_ids: [B, S] -> the rotations of these positions."""
        full = self.full(position_ids)
        return Rotations(full, full if self.local is None else self.local(position_ids))


def rotary_embedding(shape: ModelShape, dtype: torch.dtype = torch.float32) -> RotaryEmbedding:
    """The rotation of a layer without a window."""
    scaling = asdict(shape.rope_scaling) if shape.rope_scaling is not None else None
    frequencies = rotary_frequencies(shape.head_dim, shape.rope_theta, scaling)
    return RotaryEmbedding(shape.max_position_embeddings, frequencies, dtype=dtype)
