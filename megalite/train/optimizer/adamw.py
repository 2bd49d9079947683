"""AdamW (Loshchilov and Hutter 2019), by torch, or in one pass over weights, moments, gradients and 16-bit copies.

benchmarks/kernels_optimizer.py measures it beside torch's fused update; the look that chose it for every type on a CPU
was taken on a busy machine (torch's took 3 times the CPU time). On a GPU nothing is measured yet: float32 weights stay
with torch's there, which reads and writes as little as ours.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalite.ops.adamw import AdamW, AdamWRule, AdamWTensors
from megalite.ops.choice import TORCH
from megalite.topology.optimizers import FIRST_MOMENT, SECOND_MOMENT
from megalite.train.optimizer.rule import OptimizerParts, UpdateRule, ensure_state


class TorchAdamW(torch.optim.AdamW, UpdateRule):
    """torch's fused AdamW with a state before its first step."""

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def initial_state(self, weight: Tensor) -> dict[str, Any]:
        # torch's fused update needs the count as a float32 tensor on the weight's device.
        return {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            FIRST_MOMENT: torch.zeros_like(weight),
            SECOND_MOMENT: torch.zeros_like(weight),
        }


class OnePassAdamW(TorchAdamW):
    """TorchAdamW whose groups, state and hooks are torch's own, and whose update is one call of an operator.

    Unlike torch's it takes the gradients of the 16-bit weights that `copies` names, as they are, and writes those
    weights in the same pass. A result differs from torch's by float32's rounding: the gradient is scaled where it is
    used instead of before, and the coefficients are rounded once.

    copies: master -> its 16-bit weight. gradient_scale: what the next step's gradients are multiplied by.
    update: the operator that does it.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        copies: Mapping[Tensor, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        update: AdamW,
    ):
        super().__init__(groups, betas=betas, eps=eps)
        self.copies, self.gradient_scale, self._update = copies, 1.0, update
        self.register_step_pre_hook(lambda self, _arguments, _keywords: ensure_state(self))

    def initial_state(self, weight: Tensor) -> dict[str, Any]:
        return super().initial_state(weight) | {"step": torch.zeros((), dtype=torch.float32)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of what has a gradient; its state is there already."""
        for group in self.param_groups:
            for step, weights in self._alike(group):
                states = [self.state[weight] for weight in weights]
                torch._foreach_add_([state["step"] for state in states], 1)
                self._update(
                    AdamWTensors(
                        weights,
                        [self.copies[weight] for weight in weights if weight in self.copies],
                        [self._gradient(weight) for weight in weights],
                        [state[FIRST_MOMENT] for state in states],
                        [state[SECOND_MOMENT] for state in states],
                    ),
                    AdamWRule(
                        learning_rate=group["lr"],
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        step=step + 1,
                        gradient_scale=self.gradient_scale,
                    ),
                )

    def _alike(self, group: Mapping[str, Any]) -> Iterator[tuple[float, list[Tensor]]]:
        """The group's weights by type, copies, and how many updates they have had: one list, as a rule."""
        weights = [each for each in group["params"] if self.copies.get(each, each).grad is not None]
        if not weights:
            return
        # They lie on the host (initial_state): no wait for a device.
        steps = torch.stack([self.state[each]["step"] for each in weights]).tolist()
        by_type: dict[Any, list[Tensor]] = defaultdict(list)
        for step, weight in zip(steps, weights, strict=True):
            copy = self.copies.get(weight, weight)
            by_type[step, weight.dtype, copy.dtype, self._gradient(weight).dtype].append(weight)
        for (step, *_), alike in by_type.items():
            yield step, alike

    def _gradient(self, weight: Tensor) -> Tensor:
        gradient = self.copies.get(weight, weight).grad
        assert gradient is not None
        return gradient


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    settings, copies = parts.settings.optimizer, _written_copies(parts)
    if copies is None:
        return TorchAdamW(parts.groups(), betas=settings.betas, eps=settings.eps)
    update = parts.settings.operators.adamw
    return OnePassAdamW(parts.groups(), copies, betas=settings.betas, eps=settings.eps, update=update)


def _written_copies(parts: OptimizerParts) -> Mapping[Tensor, nn.Parameter] | None:
    """Return master -> low-precision weight for the one-pass update; None where torch's own update is used."""
    settings, copies = parts.settings, parts.copies
    if copies is None:
        return None
    faster = settings.operators.of("adamw") != TORCH and (parts.mesh.device.type == "cpu" or bool(copies))
    # In place, clipping values of 16 bits would round them.
    rounds = bool(copies) and settings.optimizer.clip_value > 0 and settings.training.accumulation == "model"
    return copies if faster and not rounds else None
