"""Products with the stacked weights of several experts, one [out, in] for each group of rows.

On a CPU, and in float32 or float64, a loop over the experts that have rows; in bfloat16 on an accelerator one grouped
product. The host knows the counts (the exchange of rows needs them there), so that nothing here waits for a device.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A grouped product reads rows whose strides are multiples of so many bytes.
_ALIGNMENT = 16


class _Group(NamedTuple):
    """An expert with rows: which rows are its own, and which rows of the stacked weight [n * out, in]."""

    rows: slice
    weight: slice


def _groups(counts: Sequence[int], out: int) -> Iterator[_Group]:
    """Yield the groups of the experts that have rows. out: the rows of each expert's weight."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield _Group(slice(begin, begin + count), slice(expert * out, (expert + 1) * out))
        begin += count


def expert_products(rows: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool = False) -> Tensor:
    """Return rows W_e^T of each expert e, or rows W_e where transposed; outside autograd.

    rows: [R, in], or [R, out] where transposed, sorted by expert. weight: [n * out, in]. counts: the rows of each of n.
    """
    stacked = weight.view(len(counts), -1, weight.shape[1])
    width = stacked.shape[2 if transposed else 1]
    if _in_one_product(rows, weight, len(counts)):
        matrices = stacked if transposed else stacked.transpose(1, 2)
        return F.grouped_mm(rows, matrices, offs=_ends(counts, rows.device))
    products = rows.new_empty(len(rows), width)
    for own, part in _groups(counts, stacked.shape[1]):
        torch.mm(rows[own], weight[part] if transposed else weight[part].t(), out=products[own])
    return products


def expert_weight_gradients(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return grad_e^T rows_e of each expert, stacked: [n * out, in]; zeros for one without rows.

    grad: [R, out], rows: [R, in], both sorted by expert.
    """
    out, width = grad.shape[1], rows.shape[1]
    if _in_one_product(grad, rows, len(counts)):
        return F.grouped_mm(grad.t(), rows, offs=_ends(counts, rows.device)).flatten(0, 1)
    by_expert = rows.new_empty(len(counts), out, width)
    for own_grad, own_rows, product in zip(grad.split(counts), rows.split(counts), by_expert, strict=True):
        torch.mm(own_grad.t(), own_rows, out=product)  # zeros where there are no rows
    return by_expert.flatten(0, 1)


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
    if _in_one_product(grad, rows, len(counts)):
        total.add_(expert_weight_gradients(grad, rows, counts))
        return
    for own, part in _groups(counts, grad.shape[1]):
        add(total[part], grad[own], rows[own])


def _in_one_product(one: Tensor, other: Tensor, experts: int) -> bool:
    """Return whether a grouped product serves both: torch has it in bfloat16, for at least a row."""
    aligned = all(each.stride(0) * each.element_size() % _ALIGNMENT == 0 for each in (one, other))
    wide = one.device.type != "cpu" and one.dtype == torch.bfloat16
    return wide and aligned and experts > 1 and len(one) > 0


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    # Pinned: the host would wait for a copy of other memory.
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, pin_memory=True)
    return ends.to(device, non_blocking=True)
