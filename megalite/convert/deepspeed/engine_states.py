"""The weights and moments of all parameters of a checkpoint of DeepSpeed's engine, by name."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.convert.adamw import require_adamw
from megalite.convert.deepspeed.folder import WEIGHTS_ONLY, EngineFiles
from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.partitions import OptimizerPartitions
from megalite.convert.deepspeed.unpartitioned import UnpartitionedOptimizer
from megalite.convert.universal.folder import MOMENTS, STATE_FILES, WEIGHTS
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
        self.model = self.models[0]
        self.trained: TrainedStates = (
            OptimizerPartitions(files.optimizer, self.model.shapes)
            if files.optimizer
            else UnpartitionedOptimizer(self.model)
        )
        self._require_adamw()

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
            return self.trained.read(name, state).float()
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

    @property
    def optimizer_parameters(self) -> Mapping[str, Any]:
        """`optimizer.params` of the DeepSpeed JSON; empty where the program made the optimizer itself."""
        section = self.model.settings.get("optimizer")
        parameters = section.get("params") if isinstance(section, Mapping) else None
        return parameters if isinstance(parameters, Mapping) else {}

    def _require_adamw(self) -> None:
        section = self.model.settings.get("optimizer")
        kind = section.get("type") if isinstance(section, Mapping) else None
        others = sorted(self.trained.other_states() - {*MOMENTS})
        name = "" if str(kind or "adam").lower() in ("adam", "adamw") else str(kind)
        if name or others:
            raise CheckpointError(
                f"{self.place} was trained with {name or 'an optimizer with ' + ', '.join(others)}, but only the states"
                f" of Adam and AdamW are read; {WEIGHTS_ONLY}"
            )
        in_json = {"decoupled_weight_decay": self.optimizer_parameters.get("adam_w_mode")}
        groups = [{**in_json, **group} for group in self.trained.param_groups]
        require_adamw(groups, self.place)
        if any(group.get("bias_correction") is False for group in groups):
            raise CheckpointError(
                f"{self.place} was trained without bias_correction, which AdamW here always has; {WEIGHTS_ONLY}"
            )
        self.trained.require(STATE_FILES)
