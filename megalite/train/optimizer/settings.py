"""The settings of an optimizer, and the groups of parameters that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megalite.config.sections.schema import OptimizerConfig
from megalite.config.sections.training_section import PrecisionSettings
from megalite.ops.choice import PLAIN_TORCH, Operators
from megalite.topology.parameter_groups import ParameterGroup, group_of
from megalite.topology.parameters import Parameter


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an update; 0 switches clipping and the average of weights off.

    optimizer, training: the sections of these names. groups: optimizer.groups with the names of the family's files.
    native: DeepSpeed's own AdamW updates, which ZeRO alone has. operators: which implementation of each is used;
    `assemble` sets it.
    """

    optimizer: OptimizerConfig
    training: PrecisionSettings = field(default_factory=PrecisionSettings)
    groups: tuple[ParameterGroup, ...] = ()
    native: bool = False
    operators: Operators = PLAIN_TORCH


def update_groups(
    settings: OptimizerSettings, parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameters as torch's groups, one for each rule of update: the same on every rank; a group may be empty.

    A parameter in no group of the settings has the schedule's learning rate, and weight decay unless it is a norm or
    a bias.
    """
    groups: list[dict[str, Any]] = []
    for group in (None, *settings.groups):
        ratio = 1.0 if group is None else group.learning_rate_ratio
        group_decay = None if group is None else group.weight_decay
        for decays in (True, False):
            members = [p for p in parameters if group_of(p, settings.groups) == group and p.decay == decays]
            decay = settings.optimizer.weight_decay if decays else 0.0
            groups.append(
                {
                    "params": [tensors[each.name] for each in members],
                    "learning_rate_ratio": ratio,
                    "weight_decay": decay if group_decay is None else group_decay,
                    "ema_decay": settings.optimizer.ema_decay,
                }
            )
    return groups


def filled_groups(
    settings: OptimizerSettings, parameters: Sequence[Parameter], tensors: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The groups of `update_groups` that are not empty, as an optimizer takes them."""
    return [group for group in update_groups(settings, parameters, tensors) if group["params"]]
