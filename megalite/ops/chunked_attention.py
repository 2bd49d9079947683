"""Attention in plain torch, a chunk of queries at a time: no S x S tensor in the forward or the backward.

The backward computes the probabilities again (Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021).
Keys that no query of a chunk sees, after the chunk or before its window, are left out of the products.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops.activations import cap_with_slope

# Limits of a piece: scores in elements, then queries. On a CPU the scores must stay in cache; 64 and 128 queries were
# the fastest from 32 to 256, with 8 heads and 1024 keys. An accelerator needs large products: 256 MiB of float32.
_CPU_SCORES, _DEVICE_SCORES = 2**20, 2**26
_FEWEST_QUERIES, _MOST_ON_CPU = 32, 64


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that a query sees: causal, aligned at the end of queries and keys, and only the last `window`.

    seen: a further bool mask [S, T] or [B, 1, S, T]. document_ids: [B, T], of the keys: only those with the query's id.
    """

    window: int | None = None
    seen: Tensor | None = None
    document_ids: Tensor | None = None

    def of_rows(self, rows: slice) -> "VisibleKeys":
        """Return the visibility of a slice of the B rows."""
        seen, ids = self.seen, self.document_ids
        if seen is not None and seen.dim() == 4:
            seen = seen[rows]
        return VisibleKeys(self.window, seen, None if ids is None else ids[rows])

    def keys(self, queries: slice, behind: int) -> slice:
        """Return the slice from the first to the last visible key; `behind`: the number of keys before query 0."""
        begin = 0 if self.window is None else max(0, behind + queries.start - self.window + 1)
        return slice(begin, behind + queries.stop)

    def mask(self, queries: slice, behind: int, device: torch.device) -> Tensor | None:
        """Return the mask of queries and their `keys`: bool, broadcastable to [B, 1, queries, keys]; None: no mask."""
        keys = self.keys(queries, behind)
        if queries.stop - queries.start == 1 and self.seen is None and self.document_ids is None:
            return None
        place = torch.arange(behind + queries.start, behind + queries.stop, device=device).unsqueeze(1)
        key_place = torch.arange(keys.start, keys.stop, device=device)
        mask = key_place <= place
        if self.window is not None:
            mask = mask & (key_place > place - self.window)
        if self.seen is not None:
            mask = mask & self.seen[..., queries, keys]
        if self.document_ids is not None:
            ids = self.document_ids
            own = ids[:, behind + queries.start : behind + queries.stop]
            mask = mask & (own[:, None, :, None] == ids[:, None, None, keys])
        return mask


class _Form(NamedTuple):
    visible: VisibleKeys
    scale: float
    softcap: float | None


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: VisibleKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(softcap * tanh(scale Q K^T / softcap)) V over visible keys; without cap softmax(scale Q K^T) V.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D], T >= S; heads is a multiple of kv heads, and no key is
    repeated. Scores are at least float32 between the two products. Returns [B, S, heads, D].
    """
    attended: Tensor = _ChunkedAttention.apply(query, key, value, _Form(visible, scale, softcap))
    return attended


class _ChunkedAttention(torch.autograd.Function):
    """Saves only its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, form: _Form) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.form = form
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows, queries in pieces(query, key):
            values = value[rows].transpose(1, 2)
            piece = _Piece(query[rows], key[rows], queries, form, rows)
            attended = torch.matmul(piece.probabilities.to(query.dtype), values[:, :, piece.keys])
            output[rows, queries] = ungroup_heads(attended, query.shape[2])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        form, heads, compute_dtype = ctx.form, query.shape[2], torch.promote_types(query.dtype, torch.float32)
        query_grad = torch.empty_like(query, memory_format=torch.contiguous_format)
        key_grad, value_grad = (
            torch.zeros_like(
                tensor.transpose(1, 2), dtype=compute_dtype, memory_format=torch.contiguous_format
            )
            for tensor in (key, value)
        )
        for rows, queries in pieces(query, key):
            piece = _Piece(query[rows], key[rows], queries, form, rows, slopes=True)
            keys, grads = piece.keys, group_heads(output_grad[rows, queries], key.shape[2])
            low = piece.probabilities.to(query.dtype)
            value_grad[rows, :, keys] += torch.matmul(low.transpose(2, 3), grads)
            score_grad = torch.matmul(grads, value[rows, keys].permute(0, 2, 3, 1)).to(compute_dtype)
            score_grad = torch.ops.aten._softmax_backward_data(
                score_grad, piece.probabilities, -1, compute_dtype
            )
            if piece.slopes is not None:
                score_grad.mul_(piece.slopes)
            score_grad = score_grad.to(query.dtype)
            of_queries = torch.matmul(score_grad, key[rows, keys].transpose(1, 2)).mul_(form.scale)
            query_grad[rows, queries] = ungroup_heads(of_queries, heads)
            key_grad[rows, :, keys] += torch.matmul(score_grad.transpose(2, 3), piece.queries)
        return (
            query_grad,
            key_grad.transpose(1, 2).to(key.dtype),
            value_grad.transpose(1, 2).to(value.dtype),
            None,
        )


class _Piece:
    """The probabilities of a slice of queries and rows: [rows, kv heads, group * queries, keys], at least float32.

    queries: the scaled queries [rows, kv heads, group * queries, D]. slopes: d(capped score) / d(score), if asked for.
    """

    def __init__(
        self, query: Tensor, key: Tensor, queries: slice, form: _Form, rows: slice, *, slopes: bool = False
    ):
        behind, heads = key.shape[1] - query.shape[1], key.shape[2]
        self.keys = form.visible.keys(queries, behind)
        self.queries = group_heads(query[:, queries], heads) * form.scale
        scores = torch.matmul(self.queries, key[:, self.keys].permute(0, 2, 3, 1))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        self.slopes: Tensor | None = None
        if form.softcap is not None and slopes:
            self.slopes = cap_with_slope(scores, form.softcap)
        elif form.softcap is not None:
            scores.div_(form.softcap).tanh_().mul_(form.softcap)
        mask = form.visible.of_rows(rows).mask(queries, behind, query.device)
        if mask is not None:
            # Dim 2 holds the heads of a group one after another: [rows, kv heads, group, queries, keys].
            grouped = scores.unflatten(2, (-1, queries.stop - queries.start))
            grouped.masked_fill_(~(mask if mask.dim() == 2 else mask.unsqueeze(2)), float("-inf"))
        self.probabilities = scores.softmax(dim=-1)


def pieces(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """Return the slices of rows and queries of all pieces, in order."""
    (rows, new, heads), total = query.shape[:3], key.shape[1]
    on_cpu = query.device.type == "cpu"
    scores, most = (_CPU_SCORES, _MOST_ON_CPU) if on_cpu else (_DEVICE_SCORES, new)
    several = min(rows, max(1, scores // max(1, _MOST_ON_CPU * heads * total)))
    fitting = scores // max(1, several * heads * total) // _FEWEST_QUERIES * _FEWEST_QUERIES
    count = max(_FEWEST_QUERIES, min(fitting, most))
    return [
        (slice(row, min(row + several, rows)), slice(place, min(place + count, new)))
        for row in range(0, rows, several)
        for place in range(0, new, count)
    ]


def group_heads(values: Tensor, kv_heads: int) -> Tensor:
    """Return [B, S, heads, D] as [B, kv heads, group * S, D]: the query heads of a group one after another."""
    rows, length, heads, size = values.shape
    split = values.reshape(rows, length, kv_heads, heads // kv_heads, size)
    return split.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)


def ungroup_heads(values: Tensor, heads: int) -> Tensor:
    """Invert `group_heads`."""
    rows, kv_heads, _, size = values.shape
    split = values.view(rows, kv_heads, heads // kv_heads, -1, size)
    return split.permute(0, 3, 1, 2, 4).flatten(2, 3)
