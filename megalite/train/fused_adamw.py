"""torch's AdamW with its update replaced by one pass over weights, moments, gradients and 16-bit copies.

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


class OnePassAdamW(torch.optim.AdamW):
    """torch.optim.AdamW whose groups, state and hooks are torch's own, and whose update is one call of an operator.

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
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.copies, self.gradient_scale, self._update = copies, 1.0, update

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
                        [state["exp_avg"] for state in states],
                        [state["exp_avg_sq"] for state in states],
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
        # They lie on the host (ensure_state): no wait for a device.
        steps = torch.stack([self.state[each]["step"] for each in weights]).tolist()
        found: dict[Any, list[Tensor]] = defaultdict(list)
        for step, weight in zip(steps, weights, strict=True):
            copy = self.copies.get(weight, weight)
            found[step, weight.dtype, copy.dtype, self._gradient(weight).dtype].append(weight)
        for (step, *_), alike in found.items():
            yield step, alike

    def _gradient(self, weight: Tensor) -> Tensor:
        gradient = self.copies.get(weight, weight).grad
        assert gradient is not None
        return gradient
