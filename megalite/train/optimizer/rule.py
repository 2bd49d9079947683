"""The base of the optimizers that are megalite's own."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor


class UpdateRule(torch.optim.Optimizer):
    """A torch optimizer that says which state a weight begins with, so that a checkpoint can load before any step."""

    @abstractmethod
    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a weight before its first update."""

    @abstractmethod
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient. The gradients are undefined afterwards."""

    def _has_gradient(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the weights of a group that have a gradient; each of them has its state."""
        weights = [each for each in group["params"] if each.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight].update(self.initial_state(weight))
        return weights
