"""Rotary position embedding: the angles of one micro batch, looked up in tables that a stage builds once."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.model.rope_scaling import attention_factor, rotary_frequencies
from megalite.ops.rotary import Rotation, rotary_table
from megalite.topology.shape import ModelShape


class Rotations(NamedTuple):
    """The rotations of one micro batch, for layers without and with a sliding window."""

    full: Rotation
    local: Rotation

    def of(self, window: int | None) -> Rotation:
        """Return the rotation of a layer with this window."""
        return self.full if window is None else self.local


class RotaryEmbedding(nn.Module):
    """The rotations of all layers of one kind.

    One table holds the angles of sequences up to `switch` tokens; with LongRoPE a second one holds those of longer
    sequences. Dynamic NTK has other frequencies for each longer length: its angles are then computed, not looked up.
    Each token has the angles of its own sequence's length, whatever stands beside that sequence in a row or a batch.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        scaling = shape.rope_scaling
        self.kind = None if scaling is None else scaling.rope_type
        self.switch = shape.max_position_embeddings
        if scaling is not None and scaling.rope_type == "longrope":
            self.switch = min(scaling.original_max_position_embeddings, self.switch)
        self.cosines: Tensor
        self.sines: Tensor
        self.long_cosines: Tensor
        self.long_sines: Tensor
        self._register("", 1)
        if self.switch < shape.max_position_embeddings:
            self._register("long_", shape.max_position_embeddings)

    @property
    def follows_length(self) -> bool:
        """Whether a token's angles depend on the length of its sequence."""
        return self.kind == "dynamic" or self.switch < self.shape.max_position_embeddings

    def forward(self, position_ids: Tensor, lengths: int | Tensor) -> Rotation:
        """position_ids [B, S] -> the rotation of these positions.

        lengths: tokens of the sequence that each position belongs to, those in the key-value cache included: one number
        for all, or int64 [B or 1, S or 1].
        """
        same = isinstance(lengths, int)
        if not self.follows_length or (same and lengths <= self.switch):
            return _looked_up(self.cosines, self.sines, position_ids)
        if self.kind == "dynamic":
            return self._computed(position_ids, lengths)
        beyond = _looked_up(self.long_cosines, self.long_sines, position_ids)
        if isinstance(lengths, int):
            return beyond
        within = _looked_up(self.cosines, self.sines, position_ids)
        is_long = (lengths > self.switch)[..., None, None]
        return Rotation(
            torch.where(is_long, beyond.cosines, within.cosines),
            torch.where(is_long, beyond.sines, within.sines),
        )

    def _register(self, prefix: str, length: int) -> None:
        frequencies = rotary_frequencies(self.shape, length)
        factor = attention_factor(self.shape.rope_scaling)
        tables = rotary_table(self.shape.max_position_embeddings, frequencies, torch.float64)
        for name, table in zip(("cosines", "sines"), tables, strict=True):
            self.register_buffer(prefix + name, (table * factor).to(self.dtype), persistent=False)

    def _computed(self, position_ids: Tensor, lengths: int | Tensor) -> Rotation:
        frequencies = rotary_frequencies(self.shape, lengths).to(position_ids.device)
        angles = position_ids.to(torch.float64).unsqueeze(-1) * frequencies
        cosines, sines = (table.to(self.dtype).unsqueeze(2) for table in (angles.cos(), angles.sin()))
        return Rotation(cosines, sines)


def _looked_up(cosines: Tensor, sines: Tensor, position_ids: Tensor) -> Rotation:
    return Rotation(*Rotation(cosines, sines, position_ids).angles())


class LayerRotations(nn.Module):
    """The rotations of all layers of a model with rotary positions."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.full = RotaryEmbedding(shape, dtype)
        self.local: RotaryEmbedding | None = None
        if shape.rope_local_base_freq is not None:
            local = replace(shape, rope_theta=shape.rope_local_base_freq, rope_scaling=None)
            self.local = RotaryEmbedding(local, dtype)

    def forward(self, position_ids: Tensor, lengths: int | Tensor | None = None) -> Rotations:
        """position_ids [B, S] -> the rotations of these positions; lengths: see RotaryEmbedding; default: S."""
        lengths = position_ids.shape[1] if lengths is None else lengths
        full = self.full(position_ids, lengths)
        return Rotations(full, full if self.local is None else self.local(position_ids, lengths))
