"""How a model computes, as opposed to what it is (topology.parameters.ModelShape)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dropout:
    """The share of values dropped in training: of the embedding's output, of what attention and MLP add to the
    residual stream, of the MLP's activations, of the attention probabilities."""

    embedding: float = 0.0
    residual: float = 0.0
    mlp: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class ModelOptions:
    """dtype: of weights and activations; logits and losses of 16-bit models are float32.

    split_backward: the schedule asks for the gradients of inputs and weights at different times, so that an
    autograd node that gives both would run twice.
    """

    dtype: torch.dtype = torch.float32
    split_backward: bool = False
    dropout: Dropout = Dropout()
    dropout_seed: int = 0

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


PLAIN = ModelOptions()
