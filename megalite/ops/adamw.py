"""Operators on lists of tensors: the sum of squares, AdamW over float32 masters, sums of gradients.

AdamW follows Loshchilov and Hutter (2019) with the bias corrections of Kingma and Ba (2015), as in torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.ops import extension


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements: a float64 scalar on the tensors' device, which all must share.

    Each tensor's norm is computed in at least float32.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = {
        alike[0].dtype: iter(
            torch._foreach_norm(alike, 2, torch.promote_types(alike[0].dtype, torch.float32))
        )
        for alike in _by_type(tensors)
    }
    in_order = torch.stack([next(norms[tensor.dtype]) for tensor in tensors])
    # cumsum adds one by one, in the order of the tensors; sum would not.
    return in_order.double().square().cumsum(0)[-1]


def compiled_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Same as `sum_of_squares`, by the compiled operator.

    Sums in float64 over blocks that depend on the sizes only, so the result does not depend on the number of threads.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    sums = [torch.ops.megalite.sum_of_squares(alike) for alike in _by_type(tensors)]
    total: Tensor = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return total


@dataclass(frozen=True)
class AdamWTensors:
    """The tensors of one update, as lists of the same order.

    weights, exp_avgs, exp_avg_sqs: float32 or float64, updated in place. gradients: of that dtype; float32 weights may
    have low-precision ones. copies: empty, or low-precision copies that are overwritten with the rounded weights.
    """

    weights: Sequence[Tensor]
    copies: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]


@dataclass(frozen=True)
class AdamWRule:
    """The numbers of one update. step: the number of updates including this one. gradients are multiplied by
    `gradient_scale`."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: float
    gradient_scale: float = 1.0


AdamW = Callable[[AdamWTensors, AdamWRule], None]


@torch.no_grad()
def adamw_(tensors: AdamWTensors, rule: AdamWRule) -> None:
    """Update weights, moments and copies in place."""
    weights = tensors.weights
    if not weights:
        return
    gradients = [*tensors.gradients]
    if all(gradient.dtype == weight.dtype for weight, gradient in zip(weights, gradients, strict=True)):
        scaled = [*torch._foreach_mul(gradients, rule.gradient_scale)]
    else:  # in place: a second copy of all gradients would be as large as the weights
        scaled = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(scaled, gradients)
        torch._foreach_mul_(scaled, rule.gradient_scale)
    counts = [torch.full((), rule.step, dtype=torch.float32, device=weights[0].device)] * len(weights)
    lists = [[*weights], scaled, [*tensors.exp_avgs], [*tensors.exp_avg_sqs], [], counts]
    numbers: dict[str, Any] = {"lr": rule.learning_rate, "beta1": rule.betas[0], "beta2": rule.betas[1]}
    numbers |= {"weight_decay": rule.weight_decay, "eps": rule.eps}
    torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **numbers)
    copy_rounded(tensors)


@torch.no_grad()
def compiled_adamw_(tensors: AdamWTensors, rule: AdamWRule) -> None:
    """Same as `adamw_`, in one pass over all tensors."""
    lists = (tensors.weights, tensors.copies, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs)
    torch.ops.megalite.adamw_(
        *([*each] for each in lists),
        rule.learning_rate,
        *rule.betas,
        rule.eps,
        rule.weight_decay,
        rule.step,
        rule.gradient_scale,
    )
    # So that autograd sees where a weight was saved before it changed.
    torch.autograd.graph.increment_version([*tensors.weights, *tensors.copies])


def copy_rounded(tensors: AdamWTensors) -> None:
    """Overwrite the copies with the weights."""
    if tensors.copies:
        torch._foreach_copy_([*tensors.copies], [*tensors.weights])


@torch.no_grad()
def accumulate_(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to its sum in place: total is float32 and gradient float32, bf16 or fp16, or both are float64."""
    total.add_(gradient)


@torch.no_grad()
def compiled_accumulate_(total: Tensor, gradient: Tensor) -> None:
    """Same as `accumulate_`, by the compiled operator."""
    torch.ops.megalite.accumulate_(total, gradient)
    torch.autograd.graph.increment_version(total)


def add_weight_gradient_(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """Add a linear's weight gradient: total [out, in] += grad [N, out]^T inputs [N, in]; types as in `accumulate_`."""
    accumulate_(total, grad.t() @ inputs)


def compiled_add_weight_gradient_(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """Same as `add_weight_gradient_`, by the compiled operator."""
    compiled_accumulate_(total, grad.t() @ inputs)


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors grouped by dtype, in the order in which each dtype first occurs."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    return [*by_dtype.values()]


def _no_output(*_arguments: object) -> None:
    return None


extension.register("sum_of_squares", fake=lambda tensors: tensors[0].new_empty((), dtype=torch.float64))
extension.register("adamw_", fake=_no_output)
extension.register("accumulate_", fake=_no_output)
