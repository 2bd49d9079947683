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
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, form: AttentionForm = CAUSAL
) -> Tensor:
    """Return softmax(scale Q K^T) V of one query a row: [n, heads, D].

    query: [n, heads, D]; key, value: [n, kv heads, T, D]; heads is a multiple of kv heads. bias: [n, 1, 1, T], added to
    the scores, -inf for a key that a row does not see; None: all are seen. form: its scale, soft cap and sinks.
    """
    # The query heads of a group are the queries of one key-value head, so that no key is repeated.
    grouped = query.unflatten(1, (key.shape[1], -1))
    if form.softcap is None and form.sinks is None:
        attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=form.scale)
        return attended.flatten(1, 2)
    scores = torch.matmul(grouped * form.factor(query.shape[-1]), key.transpose(2, 3))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if form.softcap is not None:
        scores = soft_capped(scores, form.softcap)
    if bias is not None:
        scores = scores + bias
    if form.sinks is not None:
        sinks = form.sinks.to(scores.dtype).view(1, *grouped.shape[1:3], 1)
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : key.shape[2]]
    return torch.matmul(probabilities.to(query.dtype), value).flatten(1, 2)


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
