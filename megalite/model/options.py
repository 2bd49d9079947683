"""How a model computes, as opposed to what it is (topology.parameters.ModelShape)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelOptions:
    """dtype: of weights and activations; logits and losses of 16-bit models are float32.

    split_backward: the schedule asks for the gradients of inputs and weights at different times, so that an
    autograd node that gives both would run twice.
    """

    dtype: torch.dtype = torch.float32
    split_backward: bool = False

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


PLAIN = ModelOptions()
