"""The weights and moments of all parameters of a checkpoint of DeepSpeed's engine, by name."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.convert.deepspeed.adam_settings import require_adam
from megalite.convert.deepspeed.folder import EngineFiles
from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.partitions import OptimizerPartitions
from megalite.convert.deepspeed.unpartitioned import UnpartitionedOptimizer
from megalite.convert.universal.folder import STATE_FILES, WEIGHTS
from megalite.errors import CheckpointError


class TrainedStates(Protocol):
    """The states of the parameters that the optimizer has."""

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""

    @property
    def aliases(self) -> Collection[str]:
        """Further names of tied parameters, beside `shared_params` of the model states."""

    @property
    def names(self) -> Collection[str]:
        """The parameters."""

    @property
    def step(self) -> float:
        """How many updates the optimizer made; raises CheckpointError where parameters differ in it."""

    @property
    def table(self) -> Mapping[str, Any]:
        """The optimizer's state dict, which has the loss scale."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The hyperparameters of each group."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape."""

    def read(self, name: str, state: str) -> Tensor:
        """Return a parameter's values under a state key, in its shape or flat."""

    def group_of(self, name: str) -> Mapping[str, Any]:
        """Return the hyperparameters of a parameter's group."""

    def require(self, states: Sequence[str]) -> None:
        """Raise CheckpointError for a parameter that lacks one of these states."""

    def other_states(self) -> set[str]:
        """Return the state keys beside the weights."""


class EngineStates:
    """Trained parameters from the optimizer, frozen ones from the model states with moments of zero."""

    def __init__(self, files: EngineFiles):
        """Raises CheckpointError for files that are missing, damaged or of different runs, and another optimizer."""
        self.place = files.place
        self.models = [ModelStates.open(path) for path in files.model]
        for model in self.models:
            model.require_module()
        self.model = self.models[0]
        self.trained: TrainedStates = (
            OptimizerPartitions(files.optimizer, self.model.shapes)
            if files.optimizer
            else UnpartitionedOptimizer(self.model)
        )
        require_adam(self.trained.param_groups, self.model.settings, self.trained.other_states(), self.place)
        self.trained.require(STATE_FILES)

    @cached_property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that the optimizer does not have, by name."""
        if self.model.frozen_shapes:
            return {name: shape for name, shape in self.model.frozen_shapes.items() if 0 not in shape}
        aliases = {*self.model.shared, *self.trained.aliases, *self.trained.names}
        return {
            name: tuple(values.shape) for name, values in self.model.module.items() if name not in aliases
        }

    @property
    def names(self) -> list[str]:
        return [*self.trained.names, *self.frozen]

    def size(self, name: str, state: str) -> tuple[int, ...]:
        return self.frozen[name] if name in self.frozen else self.trained.shape(name)

    def tensor(self, name: str, state: str) -> Tensor:
        if name not in self.frozen:
            return self.trained.read(name, state).detach().float()
        if state != WEIGHTS:
            return torch.zeros(self.frozen[name])
        return self._frozen_values(name).float()

    def _frozen_values(self, name: str) -> Tensor:
        numel, shares = torch.Size(self.frozen[name]).numel(), []
        for model in self.models:
            values = model.frozen_fragments.get(name, model.module.get(name))
            if not isinstance(values, Tensor) or not values.is_floating_point():
                raise CheckpointError(
                    f"{model.path} lacks the frozen parameter {name}; save the checkpoint again"
                )
            shares.append(values.flatten())
        values = torch.cat(shares)
        if not numel <= values.numel() < numel + len(shares):
            raise CheckpointError(
                f"{self.place} has {values.numel()} elements of the frozen parameter {name}, whose shape makes {numel};"
                " copy the folder again"
            )
        return values[:numel]
