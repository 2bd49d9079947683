"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.dropout import Mask, dropout

# Neighbouring documents that have no more tokens together are attended to at once: a call costs more than their square.
_SHARED_SPAN = 64


class Span(NamedTuple):
    """A run of the tokens of a batch laid end to end: one document, or several whole short ones.

    seen: [length, length], which of them each one sees; None where it is one document.
    """

    length: int
    seen: Tensor | None = None


# What tells the documents of [B, S] tokens apart: [B, 1, S, S], which keys each token sees; or all spans in order.
Documents = Tensor | tuple[Span, ...]


def documents_seen(document_ids: Tensor) -> Tensor:
    """[B, S] -> [B, 1, S, S]: the earlier tokens of a token's own document, itself included.

    For the kernels that take a mask of one shape whatever the documents; it is worked through in whole.
    """
    return _own_document(document_ids).unsqueeze(1)


def document_spans(document_ids: Tensor) -> tuple[Span, ...]:
    """[B, S], ascending in a row -> spans of which each is attended to on its own.

    Waits for the ids where they are on a device. On a CPU the fastest of what was measured: 4 x 1024 tokens, 8 heads of
    64, forward and backward on one thread in ms, documents of 200 (20) tokens: spans 166 (90), each document by itself
    165 (121), plain causal attention 286 (319), a boolean mask 479 (490), documents filled up to one length
    1086 (703). Flex attention has no backward on a CPU, nested tensors no kernel.
    """
    rows, length = document_ids.shape
    new_row = torch.ones(rows, 1, dtype=torch.bool, device=document_ids.device)
    starts = torch.cat((new_row, document_ids[:, 1:] != document_ids[:, :-1]), dim=1).flatten().nonzero()
    bounds = [*starts.flatten().tolist(), rows * length]
    spans: list[Span] = []
    flat = document_ids.flatten()
    for begin, end, several in _merged(bounds, length):
        spans.append(Span(end - begin, _own_document(flat[begin:end]) if several else None))
    return tuple(spans)


def _merged(bounds: list[int], row: int) -> list[tuple[int, int, bool]]:
    """Begin and end of each span, and whether it holds several documents; none reaches beyond a row's end."""
    spans: list[tuple[int, int, bool]] = []
    for begin, end in pairwise(bounds):
        if spans and begin % row and end - spans[-1][0] <= _SHARED_SPAN:
            spans[-1] = (spans[-1][0], end, True)
        else:
            spans.append((begin, end, False))
    return spans


def _own_document(document_ids: Tensor) -> Tensor:
    """[..., S] -> [..., S, S]"""
    return (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).tril()


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    mask: Mask | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V where position i sees the keys up to i, aligned at the end.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache);
    heads is a multiple of kv heads. window: it sees so many of them, itself included
    (Beltagy et al. 2020). Returns [B, S, heads, D].

    documents: where T = S, it sees those of its own document only; as a tensor where `mask` is given.

    mask: [B, heads, S, T], of the probabilities to drop. It has them written out, since no fused kernel takes a
    given mask, and keeps two matrices of its shape for the backward, where otherwise there is none.
    """
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    if isinstance(documents, tuple):
        return _attention_of_spans(query, key, value, window, documents)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    new, total = query.shape[2], key.shape[2]
    within = None if documents is None else _within(documents, window)
    if mask is not None:
        seen = _seen(new, total, window, query.device) if within is None else within
        return _dropped_attention(query, key, value, seen, mask)
    if within is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=within).transpose(1, 2)
    # One new token sees everything; a longer piece after a cache needs the mask aligned at the end.
    cut = window is not None and window < total
    aligned = _seen(new, total, window, query.device) if cut or 1 < new < total else None
    is_causal = aligned is None and new == total
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=aligned, is_causal=is_causal)
    return attended.transpose(1, 2)


def _attention_of_spans(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, spans: tuple[Span, ...]
) -> Tensor:
    lengths = [span.length for span in spans]
    # Split and joined whole: the gradients of slices would each be as large as all.
    pieces = zip(*(each.flatten(0, 1).split(lengths) for each in (query, key, value)), spans, strict=True)
    attended = []
    for *heads, (length, seen) in pieces:
        query_piece, key_piece, value_piece = (each.transpose(0, 1).unsqueeze(0) for each in heads)
        if window is not None and window < length:
            seen = _seen(length, length, window, query.device) if seen is None else _within(seen, window)
        piece = F.scaled_dot_product_attention(
            query_piece, key_piece, value_piece, attn_mask=seen, is_causal=seen is None
        )
        attended.append(piece.squeeze(0).transpose(0, 1))
    return torch.cat(attended).view_as(query)


def _within(seen: Tensor, window: int | None) -> Tensor:
    """[..., S, S], cut to the window."""
    return seen if window is None else seen.triu(1 - window)


def _seen(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [new, total] each of the last `new` positions sees."""
    seen = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def _dropped_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, mask: Mask) -> Tensor:
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(2, 3))
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)
    return torch.matmul(dropout(probabilities, mask), value).transpose(1, 2)
