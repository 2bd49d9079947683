"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V where position i sees the keys up to i, aligned at the end.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache);
    heads is a multiple of kv heads. window: it sees so many of them, itself included
    (Beltagy et al. 2020). Returns [B, S, heads, D].
    """
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    new, total = query.shape[1], key.shape[1]
    cut = window is not None and window < total
    # One new token sees everything; a longer piece after a cache needs the mask aligned at the end.
    mask = None
    if cut or 1 < new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
    if mask is not None and window is not None:
        mask = mask.triu(total - new - window + 1)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and new == total,
    )
    return attended.transpose(1, 2)
