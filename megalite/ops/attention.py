"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.dropout import Mask, dropout


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None, mask: Mask | None = None
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V where position i sees the keys up to i, aligned at the end.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache);
    heads is a multiple of kv heads. window: it sees so many of them, itself included
    (Beltagy et al. 2020). Returns [B, S, heads, D].

    mask: [B, heads, S, T], of the probabilities to drop. It has them written out, since no fused kernel takes a
    given mask, and keeps two matrices of its shape for the backward, where otherwise there is none.
    """
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    new, total = query.shape[2], key.shape[2]
    if mask is not None:
        return _dropped_attention(query, key, value, _seen(new, total, window, query.device), mask)
    # One new token sees everything; a longer piece after a cache needs the mask aligned at the end.
    cut = window is not None and window < total
    seen = _seen(new, total, window, query.device) if cut or 1 < new < total else None
    is_causal = seen is None and new == total
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=is_causal)
    return attended.transpose(1, 2)


def _seen(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [new, total] each of the last `new` positions sees."""
    seen = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def _dropped_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, mask: Mask) -> Tensor:
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(2, 3))
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)
    return torch.matmul(dropout(probabilities, mask), value).transpose(1, 2)
