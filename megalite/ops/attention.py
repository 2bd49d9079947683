"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.dropout import Mask, dropout


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, window: int | None = None
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V where position i sees the keys up to i, aligned at the end.

    mask: [B, heads, S, S], of the probabilities to drop; it has them written out, for no fused kernel takes a given
    one, and two matrices [B, heads, S, S] kept for the backward, where otherwise none is.
    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache);
    heads is a multiple of kv heads. window: it sees so many of them, itself included
    (Beltagy et al. 2020). Returns [B, S, heads, D].
    """
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    if mask is not None:
        return _attention_with_dropout(query, key, value, mask, window)
    new, total = query.shape[1], key.shape[1]
    cut = window is not None and window < total
    # One new token sees everything; a longer piece after a cache needs the mask aligned at the end.
    seen = None
    if cut or 1 < new < total:
        seen = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    if seen is not None and window is not None:
        seen = seen.triu(total - new - window + 1)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen,
        is_causal=seen is None and new == total,
    )
    return attended.transpose(1, 2)


def _attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, window: int | None
) -> Tensor:
    scores = torch.matmul(query.transpose(1, 2) * query.shape[-1] ** -0.5, key.permute(0, 2, 3, 1))
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    unseen = unseen.triu(1) if window is None else unseen.triu(1) | unseen.tril(-window)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)
    return torch.matmul(dropout(probabilities, mask), value.transpose(1, 2)).transpose(1, 2)
