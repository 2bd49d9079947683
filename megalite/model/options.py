"""ModelOptions: how a model computes. topology.shape.ModelShape says what the model is."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.schema import ModelComputeSettings
from megalite.config.sections.training_section import ComputeSettings, RecomputeMode
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.parallel.gradient_sums import BY_AUTOGRAD, WeightGradients


@dataclass(frozen=True)
class ModelOptions:
    """dtype: of weights and activations; logits and losses of bf16 and fp16 models are float32.

    model, training, adapter: the sections of these names; how a step is computed is read from them where it is used.
    operators: the implementation of each operator. `assemble` sets weight_gradients.
    expert_dispatch: how tokens meet the experts of other ranks: they go there and come back, or, without training, the
    ranks that share a sequence gather its tokens and sum the outputs of their own experts.
    """

    dtype: torch.dtype = torch.float32
    model: ModelComputeSettings = field(default_factory=ModelComputeSettings)
    training: ComputeSettings = field(default_factory=ComputeSettings)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    dropout_seed: int = 0
    operators: Operators = PLAIN_TORCH
    weight_gradients: WeightGradients = BY_AUTOGRAD
    expert_dispatch: Literal["all_to_all", "all_gather"] = "all_to_all"

    @cached_property
    def ops(self) -> Operators:
        """The operators as the model's modules use them."""
        return replace(self.operators, compile=self.training.compile)

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def recompute_of(self, place: int, layers: int) -> RecomputeMode:
        """Return what backward recomputes of layer number `place` of a chunk with `layers` layers: nothing, attention
        from the rotated query, key and value to its output ("selective"), or all of it ("full")."""
        return self.training.recompute_of(place, layers)


PLAIN = ModelOptions()
