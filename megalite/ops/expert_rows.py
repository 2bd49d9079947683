"""Rows sorted by expert from tokens, and tokens' weighted sums of the rows that come back.

Both are look-ups and sums of k rows each. Scattered additions would come in another order in each run on a GPU.
Each has two forms: plain torch, and the compiled operators of csrc/expert_rows.h.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension


@dataclass(frozen=True)
class RowOrder:
    """The rows of T tokens with k experts each, sorted by expert and, within an expert, by token.

    tokens: [T k] int64, the token of each row. rows: [T, k] int64, the row of each token's choice. compiled: rows and
    sums of this order are made by the compiled operators.
    """

    tokens: Tensor
    rows: Tensor
    compiled: bool = False

    @classmethod
    def of(cls, experts: Tensor, compiled: bool = False) -> "RowOrder":
        """Return the order of the choices [T, k]."""
        number, chosen = experts.shape
        order = experts.flatten().argsort(stable=True)
        tokens = torch.arange(number, device=experts.device).repeat_interleave(chosen)
        return cls(tokens.index_select(0, order), inverse(order).view_as(experts), compiled)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [N] int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def rows_of_tokens(tokens: Tensor, order: RowOrder) -> Tensor:
    """Return each token once for each of its experts, sorted by expert: [T, H] -> [T k, H]."""
    rows: Tensor = _expert_rows(tokens, order.rows) if order.compiled else _RowsOfTokens.apply(tokens, order)
    return rows


def tokens_of_rows(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """Return the weighted sum of each token's rows: [T k, H] sorted by expert, weights [T, k] -> [T, H].

    The sum is at least float32 and rounded once; the weights are rounded to the type of the rows.
    """
    weights = weights.to(rows.dtype)
    tokens: Tensor = (
        _expert_sums(rows, weights, order.rows)
        if order.compiled
        else _TokensOfRows.apply(rows, weights, order)
    )
    return tokens


class _RowsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(order.rows)
        return tokens.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return F.embedding_bag(rows, grad.contiguous(), mode="sum"), None


class _TokensOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(rows, weights, order.tokens, order.rows)
        return F.embedding_bag(order.rows, rows, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weights, tokens, rows = ctx.saved_tensors
        grad, number = grad.contiguous(), rows.shape[1]
        values_grad = weights_grad = None
        if ctx.needs_input_grad[0]:
            by_row = torch.empty_like(weights.flatten()).scatter_(0, rows.flatten(), weights.flatten())
            values_grad = F.embedding_bag(
                tokens.unsqueeze(1), grad, mode="sum", per_sample_weights=by_row.unsqueeze(1)
            )
        if ctx.needs_input_grad[1]:
            bags = torch.arange(len(rows), device=rows.device)
            weights_grad = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                grad, values, rows.flatten(), bags * number, bags.repeat_interleave(number), 0
            ).view_as(weights)
        return values_grad, weights_grad, None


def _keep_places(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _expert_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _expert_sums(grad, None, *ctx.saved_tensors), None


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _expert_sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    rows, weights, places = ctx.saved_tensors
    if weights is None:
        return _expert_rows(grad, places), None, None
    return *torch.ops.megalite.expert_sums_backward(grad, rows, weights, places), None


_expert_rows = extension.register(
    "expert_rows",
    lambda tokens, places: tokens.new_empty(places.numel(), tokens.shape[1]),
    _expert_rows_backward,
    _keep_places,
)
_expert_sums = extension.register(
    "expert_sums",
    lambda rows, weights, places: rows.new_empty(len(places), rows.shape[1]),
    _expert_sums_backward,
    _keep_inputs,
)
extension.register(
    "expert_sums_backward",
    lambda grad, rows, weights, places: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)
