"""Settings of model and optimizer in few words, for tests."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.schema import ModelComputeSettings, OptimizerConfig
from megalite.config.sections.training_section import ComputeSettings, RecomputeMode
from megalite.model.options import ModelOptions
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.train.optimizer.settings import OptimizerSettings


@dataclass(frozen=True)
class Dropout:
    """The dropout probability of each site."""

    embedding: float = 0.0
    residual: float = 0.0
    mlp: float = 0.0
    attention: float = 0.0
    adapter: float = 0.0


@dataclass(frozen=True)
class Recompute:
    """The activations that backward computes again."""

    mode: RecomputeMode = "none"
    layers: int | None = None
    ratio: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of [training]."""
        return {
            "recompute": self.mode,
            "recompute_layers": self.layers,
            "recompute_ratio": self.ratio,
        }


NO_DROPOUT, NO_RECOMPUTE = Dropout(), Recompute()


def options_of(
    dtype: torch.dtype = torch.float32,
    *,
    dropout: Dropout = NO_DROPOUT,
    recompute: Recompute = NO_RECOMPUTE,
    operators: Operators = PLAIN_TORCH,
    dropout_seed: int = 0,
    chunked_loss: int = 0,
    **training: Any,
) -> ModelOptions:
    """training: other settings of ComputeSettings."""
    model = ModelComputeSettings(
        embedding_dropout=dropout.embedding,
        residual_dropout=dropout.residual,
        mlp_dropout=dropout.mlp,
        attention_dropout=dropout.attention,
        chunked_loss=chunked_loss,
    )
    compute = ComputeSettings(**recompute.settings, **training)
    return ModelOptions(
        dtype, model, compute, AdapterConfig(dropout=dropout.adapter), dropout_seed, operators
    )


def changed(settings: OptimizerSettings, **changes: Any) -> OptimizerSettings:
    """Return the settings with fields of their own, of [optimizer] or of [training] changed."""
    own = {name: changes.pop(name) for name in [each.name for each in fields(settings)] if name in changes}
    optimizer = {name: value for name, value in changes.items() if name in OptimizerConfig.model_fields}
    training = {name: value for name, value in changes.items() if name not in optimizer}
    kind = type(settings.training)
    return replace(
        settings,
        optimizer=OptimizerConfig(**dict(settings.optimizer) | optimizer),
        training=kind(**dict(settings.training) | training),
        **own,
    )
