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
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        fp32 = tensor if tensor.element_size() >= 4 else tensor.float()
        total += torch.linalg.vector_norm(fp32).double().square()
    return total


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
    scaled = [
        gradient.to(weight.dtype) * rule.gradient_scale
        for weight, gradient in zip(weights, tensors.gradients, strict=True)
    ]
    counts = [torch.full((), rule.step, dtype=torch.float32, device=weight.device) for weight in weights]
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
    for copy, weight in zip(tensors.copies, tensors.weights, strict=bool(tensors.copies)):
        copy.copy_(weight)


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
