"""SGD with momentum, by torch; its weight decay is added to the gradient."""

from typing import Any

import torch
from torch import Tensor

from megalite.train.optimizer.rule import OptimizerParts, UpdateRule


class SGD(torch.optim.SGD, UpdateRule):
    """torch.optim.SGD with a state before its first step."""

    def initial_state(self, weight: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(weight)} if self.defaults["momentum"] else {}


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    return SGD(parts.groups(), lr=0.0, momentum=parts.settings.optimizer.momentum_or_default)
