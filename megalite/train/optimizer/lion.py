"""Lion: the sign of a momentum (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

from typing import Any

import torch
from torch import Tensor

from megalite.topology.optimizers import FIRST_MOMENT
from megalite.train.optimizer.rule import OptimizerParts, UpdateRule


class Lion(UpdateRule):
    """Lion with decoupled weight decay: one state tensor a weight, and every element moves by the learning rate.

    It is elementwise, so it updates shards, and the flat partitions of ZeRO, like whole weights. Its update is larger
    than AdamW's: Chen et al. divide AdamW's learning rate by 3 to 10 and multiply its weight decay by as much.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]):
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {FIRST_MOMENT: torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = self.weights_with_gradients(group)
            if not weights:
                continue
            of_update, of_state = group["betas"]
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            averages = [self.state[weight][FIRST_MOMENT] for weight in weights]
            directions = torch._foreach_lerp(averages, gradients, 1 - of_update)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - of_state)


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    return Lion(parts.groups(), betas=parts.settings.optimizer.betas)
