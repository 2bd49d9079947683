"""Rows sorted by expert from tokens, and tokens' weighted sums of the rows that come back.

Both are look-ups and sums of k rows each. Scattered additions would come in another order in each run on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """The rows of T tokens with k experts each, sorted by expert and, within an expert, by token.

    tokens: [T k] int64, the token of each row. rows: [T, k] int64, the row of each token's choice.
    """

    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(cls, experts: Tensor) -> "RowOrder":
        """Return the order of the choices [T, k]."""
        number, chosen = experts.shape
        order = experts.flatten().argsort(stable=True)
        tokens = torch.arange(number, device=experts.device).repeat_interleave(chosen)
        return cls(tokens.index_select(0, order), inverse(order).view_as(experts))


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [N] int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def rows_of_tokens(tokens: Tensor, order: RowOrder) -> Tensor:
    """Return each token once for each of its experts, sorted by expert: [T, H] -> [T k, H]."""
    rows: Tensor = _RowsOfTokens.apply(tokens, order)
    return rows


def tokens_of_rows(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """Return the weighted sum of each token's rows: [T k, H] sorted by expert, weights [T, k] -> [T, H].

    The sum is at least float32 and rounded once; the weights are rounded to the type of the rows.
    """
    tokens: Tensor = _TokensOfRows.apply(rows, weights.to(rows.dtype), order)
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
