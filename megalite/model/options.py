"""How a model computes, as opposed to what it is (topology.parameters.ModelShape)."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

import torch

from megalite.ops.choice import PLAIN_TORCH, Operators


@dataclass(frozen=True)
class Dropout:
    """The share of values dropped in training: of the embedding's output, of what attention and MLP add to the
    residual stream, of the MLP's activations, of the attention probabilities."""

    embedding: float = 0.0
    residual: float = 0.0
    mlp: float = 0.0
    attention: float = 0.0


RecomputeMode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Recompute:
    """Activations that backward computes again: none, attention from the rotated query, key and value to its output
    ("selective"), or whole decoder layers ("full").

    layers: only the first `layers` of each chunk; ratio: only this share (or the next larger one) of
    each chunk's, spread evenly.
    """

    mode: RecomputeMode = "none"
    layers: int | None = None
    ratio: float | None = None

    def of_layer(self, place: int, layers: int) -> RecomputeMode:
        """For layer `place` of the `layers` of a chunk."""
        if self.layers is not None and place >= self.layers:
            return "none"
        if self.ratio is not None:
            chosen = ceil(self.ratio * layers - 1e-9)
            if (place + 1) * chosen // layers == place * chosen // layers:
                return "none"
        return self.mode


@dataclass(frozen=True)
class ModelOptions:
    """dtype: of weights and activations; logits and losses of bf16 and fp16 models are float32.

    compile: decoder layers run through torch.compile. label_smoothing, z_loss: as of cross_entropy.LossTerms.
    operators: which implementation of each is used. chunked_loss: how many tokens' logits exist at once, as of
    chunked_cross_entropy; 0: all.
    """

    dtype: torch.dtype = torch.float32
    dropout: Dropout = Dropout()
    dropout_seed: int = 0
    recompute: Recompute = Recompute()
    compile: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    operators: Operators = PLAIN_TORCH
    chunked_loss: int = 0

    @cached_property
    def ops(self) -> Operators:
        """The operators as the model's modules use them."""
        return replace(self.operators, compile=self.compile)

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


PLAIN = ModelOptions()
