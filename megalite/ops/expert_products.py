"""Products with the stacked weights of several experts, one [out, in] for each group of rows.

On a CPU, and in float32 or float64, a loop over the experts that have rows; in bfloat16 on an accelerator one grouped
product. The host knows the counts (the exchange of rows needs them there), so that nothing here waits for a device.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A grouped product wants rows, of inputs and outputs, whose bytes are multiples of this.
_ALIGNMENT = 16


def expert_products(rows: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool = False) -> Tensor:
    """Return rows W_e^T of each expert e, or rows W_e where transposed; outside autograd.

    rows: [R, in], or [R, out] where transposed, sorted by expert. weight: [n * out, in]. counts: the rows of each of n.
    """
    matrices = weight.view(len(counts), -1, weight.shape[1])
    if not transposed:
        matrices = matrices.transpose(1, 2)
    if _in_one_product(rows, matrices.shape):
        return F.grouped_mm(rows, matrices, offs=_ends(counts, rows.device))
    products = rows.new_empty(len(rows), matrices.shape[2])
    by_expert = zip(rows.split(counts), matrices.unbind(), products.split(counts), strict=True)
    for own, matrix, product in by_expert:
        if len(own):
            torch.mm(own, matrix, out=product)
    return products


def expert_weight_gradients(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return grad_e^T rows_e of each expert, stacked: [n * out, in]; zeros for one without rows.

    grad: [R, out], rows: [R, in], both sorted by expert.
    """
    out, width = grad.shape[1], rows.shape[1]
    if _in_one_product(rows, (len(counts), grad.shape[1], rows.shape[1])):
        return F.grouped_mm(grad.t(), rows, offs=_ends(counts, rows.device)).flatten(0, 1)
    products = rows.new_empty(len(counts), out, width)
    by_expert = zip(grad.split(counts), rows.split(counts), products.unbind(), strict=True)
    for own_grad, own, product in by_expert:
        torch.mm(own_grad.t(), own, out=product)  # zeros where there are no rows
    return products.flatten(0, 1)


def with_expert_biases(rows: Tensor, bias: Tensor, counts: Sequence[int], *, added: bool = True) -> Tensor:
    """Return the rows [R, out], sorted by expert and overwritten, each with the bias of its expert.

    bias: [n * out]. added: False: another rank adds it; the rows stay as they are and the bias has a gradient of zeros.
    """
    biased: Tensor = _WithExpertBiases.apply(rows, bias, counts, added)
    return biased


class _WithExpertBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Sequence[int], added: bool) -> Tensor:
        ctx.mark_dirty(rows)
        ctx.counts, ctx.added = counts, added
        of_experts = bias.view(len(counts), -1)
        if added and _in_one_product(rows, of_experts.shape):
            places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            owners = torch.searchsorted(_ends(counts, rows.device), places, right=True)
            rows += of_experts.index_select(0, owners)
        elif added:
            for own, of_expert in zip(rows.split(counts), of_experts, strict=True):
                own += of_expert
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        if not ctx.added:
            return grad, grad.new_zeros(len(ctx.counts) * grad.shape[1]), None, None
        # Products with ones, whose sums are float32: as many as a grouped product wants.
        ones = grad.new_ones(len(grad), _ALIGNMENT // 2)
        return grad, expert_weight_gradients(grad, ones, ctx.counts)[:, 0], None, None


def add_expert_gradients_(
    total: Tensor,
    grad: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    add: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Add the products of `expert_weight_gradients` to their sums in place; an expert without rows costs nothing.

    add: adds one product, as ops.adamw.add_weight_gradient_ does.
    """
    if _in_one_product(rows, (len(counts), grad.shape[1], rows.shape[1])):
        total.add_(expert_weight_gradients(grad, rows, counts))
        return
    sums = total.view(len(counts), -1, total.shape[1]).unbind()
    for own_total, own_grad, own in zip(sums, grad.split(counts), rows.split(counts), strict=True):
        if len(own):
            add(own_total, own_grad, own)


def _in_one_product(rows: Tensor, matrices: Sequence[int]) -> bool:
    """Return whether one grouped product serves matrices of this shape: in bfloat16, for at least one row."""
    number, *widths = matrices
    aligned = all(width * rows.element_size() % _ALIGNMENT == 0 for width in widths)
    return (
        rows.device.type != "cpu"
        and rows.dtype == torch.bfloat16
        and aligned
        and number > 1
        and len(rows) > 0
    )


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    # Pinned: the host would wait for a copy of other memory.
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)
