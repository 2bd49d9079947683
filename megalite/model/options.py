"""ModelOptions: how a model computes. topology.shape.ModelShape says what the model is."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

import torch

from megalite.ops.choice import PLAIN_TORCH, Operators


@dataclass(frozen=True)
class Dropout:
    """Dropout probabilities in training.

    embedding: the embedding's output. residual: the outputs of attention and MLP, before the residual sum. mlp: the
    MLP's activations. attention: the attention probabilities. adapter: the inputs of LoRA's A.
    """

    embedding: float = 0.0
    residual: float = 0.0
    mlp: float = 0.0
    attention: float = 0.0
    adapter: float = 0.0


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
        """Return the mode of layer number `place` of a chunk with `layers` layers."""
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

    compile: decoder layers run through torch.compile. label_smoothing, z_loss: see cross_entropy.LossTerms.
    operators: the implementation of each operator. chunked_loss: the number of tokens whose logits exist at once (see
    chunked_cross_entropy); 0: all tokens.
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
