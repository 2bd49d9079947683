"""The parts that an update rule is made from, its base class, and its state before any step."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.state import EMA
from megalite.train.optimizer.settings import OptimizerSettings, filled_groups


@dataclass(frozen=True)
class OptimizerParts:
    """The argument of `make` in an optimizer's module.

    parameters: those to update, which may be some of a model's. tensors: their masters, by name. mesh: over which an
    optimizer sees whole tensors. copies: master -> its low-precision weight; None: ZeRO owns the masters.
    """

    settings: OptimizerSettings
    parameters: Sequence[Parameter]
    tensors: Mapping[str, nn.Parameter]
    mesh: ParallelMesh
    copies: Mapping[Tensor, nn.Parameter] | None = None

    def groups(self, parameters: Sequence[Parameter] | None = None) -> list[dict[str, Any]]:
        """Return some (None: all) of the parameters as torch's groups."""
        return filled_groups(
            self.settings, self.parameters if parameters is None else parameters, self.tensors
        )

    @property
    def sharding(self) -> dict[Tensor, Parameter]:
        """Tensor -> its parameter."""
        return {self.tensors[parameter.name]: parameter for parameter in self.parameters}


class UpdateRule(torch.optim.Optimizer):
    """A torch optimizer that says which state a weight begins with, so that a checkpoint can load before any step."""

    @abstractmethod
    def initial_state(self, weight: Tensor) -> dict[str, Any]:
        """Return the state of a weight before its first update."""

    @abstractmethod
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient. The gradients are undefined afterwards."""

    def weights_with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the weights of a group that have a gradient; each of them has its state."""
        weights = [each for each in group["params"] if each.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight].update(self.initial_state(weight))
        return weights


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, so that a checkpoint has a place to load into."""
    first = optimizer.initial_state if isinstance(optimizer, UpdateRule) else _state_of_deepspeeds_adamw
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if state.keys() <= {EMA}:
                state.update(first(tensor))
            if group["ema_decay"] and EMA not in state:
                state[EMA] = tensor.detach().clone()


def _state_of_deepspeeds_adamw(weight: Tensor) -> dict[str, Any]:
    return {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
