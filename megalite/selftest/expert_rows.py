"""Rows of experts: tokens copied to the rows of their experts, and the weighted sums of those rows."""

import torch
from torch import Tensor

from megalite.ops.choice import COMPILED, Operators
from megalite.ops.expert_rows import RowOrder, rows_of_tokens, tokens_of_rows
from megalite.selftest.registry import Entry, Form, Shape, Workload, compiled

_EXPERTS = 8


def _make(shape: Shape, dtype: torch.dtype, random: Form) -> list[Tensor]:
    """Return tokens [T, H], weights [T, k], and the order of choices among 8 experts. shape: (T, k, H)."""
    tokens, chosen, hidden = shape
    values = random(tokens, hidden)
    experts = torch.arange(tokens * chosen, device=values.device).mul(5).remainder(_EXPERTS)
    order = RowOrder.of(experts.view(tokens, chosen))
    return [values, random(tokens, chosen), order.tokens, order.rows]


def _plain(values: Tensor, weights: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    rows = values[tokens]
    return rows, (weights.unsqueeze(-1) * rows[places]).sum(dim=1)


def _form(operators: Operators) -> Form:
    def form(values: Tensor, weights: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        order = RowOrder(tokens, places, operators.expert_rows == COMPILED)
        rows = rows_of_tokens(values, order)
        return rows, tokens_of_rows(rows, weights, order)

    return form


def _own(run: Workload) -> Shape | None:
    return (run.tokens, run.experts_per_token, run.hidden_size) if run.experts_per_token else None


ENTRIES = [
    Entry(
        name="rows of experts",
        operator="expert_rows",
        make=_make,
        plain=_plain,
        form_of=_form,
        candidates={COMPILED: compiled("expert_rows", "expert_sums", "expert_sums_backward")},
        gradients=2,
        shapes=((1, 1, 2), (5, 2, 33), (19, 3, 130), (64, 4, 256)),
        own=_own,
    )
]
