"""torch's AdamW with its update replaced by one pass over masters, moments, gradients and 16-bit weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalite.ops.adamw import adamw_


class MasterAdamW(torch.optim.AdamW):
    """torch.optim.AdamW over float32 masters; its groups, state and hooks are torch's own.

    Unlike torch's it takes the gradients of the 16-bit weights that `copies` names, as they are, and writes those
    weights in the same pass. A result differs from torch's by float32's rounding: the gradient is scaled where it is
    used instead of before, and the coefficients are rounded once.

    copies: master -> its 16-bit weight. gradient_scale: what the next step's gradients are multiplied by.
    fused: by the operator of ours, else by whatever stands in for it (ops.adamw).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        copies: Mapping[Tensor, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ):
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.copies, self.gradient_scale, self._fused_update = copies, 1.0, fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the masters whose weights have a gradient; their state is there already."""
        for group in self.param_groups:
            for step, masters in self._by_step(group):
                states = [self.state[master] for master in masters]
                torch._foreach_add_([state["step"] for state in states], 1)
                copies = [self.copies[master] for master in masters]
                adamw_(
                    masters,
                    copies,
                    [copy.grad for copy in copies],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    learning_rate=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=step + 1,
                    gradient_scale=self.gradient_scale,
                    fused=self._fused_update,
                )

    def _by_step(self, group: Mapping[str, Any]) -> Iterator[tuple[float, list[Tensor]]]:
        """The group's masters by how many updates they have had: all alike, as a rule."""
        masters = [each for each in group["params"] if self.copies[each].grad is not None]
        if masters:
            # One transfer from the device for all of them.
            steps = torch.stack([self.state[each]["step"] for each in masters]).tolist()
            for step in dict.fromkeys(steps):
                yield step, [each for each, its in zip(masters, steps, strict=True) if its == step]
