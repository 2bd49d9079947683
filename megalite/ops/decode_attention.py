"""Attention of one new token a row over cached keys, for rows of different lengths.

Two forms: plain torch over padded rows, and the compiled operator of csrc/decode_attention.h for CPUs, which reads each
row's own keys alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension
from megalite.ops.activations import soft_capped
from megalite.ops.attention_form import CAUSAL, AttentionForm


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale Q K^T) V of one query a row: [n, heads, D].

    query: [n, heads, D]; key, value: [n, kv heads, T, D]; heads is a multiple of kv heads. bias: [n, 1, 1, T], added to
    the scores, -inf for a key that a row does not see; None: all are seen. scale, softcap: see
    ops.attention.causal_attention.
    """
    # The query heads of a group are the queries of one key-value head, so that no key is repeated.
    grouped = query.unflatten(1, (key.shape[1], -1))
    if softcap is None:
        attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale)
        return attended.flatten(1, 2)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(grouped * factor, key.transpose(2, 3))
    scores = soft_capped(scores.to(torch.promote_types(scores.dtype, torch.float32)), softcap)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(dim=-1).to(query.dtype), value).flatten(1, 2)


def compiled_serves(cache: Tensor) -> bool:
    """Return whether the compiled operator serves a cache: on a CPU, outside autograd."""
    return cache.device.type == "cpu" and not torch.is_grad_enabled() and extension.available("cpu")


def compiled_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    lengths: Tensor,
    form: AttentionForm = CAUSAL,
) -> Tensor:
    """Write key and value into the cache, and return the attention of each row over its slot: [n, heads, D].

    query: [n, heads, D]; key, value: [n, kv heads, D]; cache: [2, slots, kv heads, room, D]; lengths: int64 [n], the
    tokens that slot i holds behind `form.prefix` virtual ones, which every row sees. form: without documents and
    dropout. A row's result does not depend on the rows beside it.
    """
    attended: Tensor = torch.ops.megalite.decode_attention(
        query,
        key,
        value,
        cache,
        lengths,
        form.prefix,
        -1 if form.window is None else form.window,
        form.factor(query.shape[-1]),
        form.softcap or 0.0,
    )
    return attended


def _fake(query: Tensor, *others: Tensor | int | float) -> Tensor:
    return query.new_empty(query.shape)


extension.register("decode_attention", _fake)
