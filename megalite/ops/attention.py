"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

import warnings
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension
from megalite.ops.activations import soft_capped
from megalite.ops.attention_backends import attend_on_device, sequences, served_on_device
from megalite.ops.attention_form import CAUSAL, AttentionForm
from megalite.ops.chunked_attention import VisibleKeys, chunked_attention
from megalite.ops.documents import CuSeqlens, Span, numbered
from megalite.ops.dropout import CountedMask, Mask, dropout
from megalite.ops.packed_attention import packed_attention, why_not_packed

# Neighbouring documents with at most this many tokens in total share one attention call: a call of their own would cost
# more than the masked-out scores.
_SHARED_SPAN = 64


def documents_seen(document_ids: Tensor, prefix: int = 0) -> Tensor:
    """Return the causal mask within documents: ids [B, S] -> bool [B, 1, S, prefix + S].

    For kernels that take a dense mask; its masked-out scores are computed too. prefix: keys in front of each row, which
    all documents see.
    """
    return F.pad(_own_document(document_ids), (prefix, 0), value=True).unsqueeze(1)


def document_spans(document_ids: Tensor) -> tuple[Span, ...]:
    """Return spans that attention computes one by one, from ids [B, S], ascending in a row.

    Synchronises with the ids' device. The fastest form on a CPU: 4 x 1024 tokens, 8 heads of size 64, forward and
    backward on one thread in ms, documents of 200 (20) tokens: spans 166 (90), one call per document 165 (121), plain
    causal attention 286 (319), a boolean mask 479 (490), documents padded to one length 1086 (703). Flex attention has
    no backward on a CPU, and nested tensors have no kernel.
    """
    bounds = [*_first_tokens(document_ids).tolist(), document_ids.numel()]
    spans: list[Span] = []
    flat = document_ids.flatten()
    for begin, end, several in _merged(bounds, document_ids.shape[1]):
        spans.append(Span(end - begin, _own_document(flat[begin:end]) if several else None))
    return tuple(spans)


def document_cu_seqlens(document_ids: Tensor) -> CuSeqlens:
    """Return the documents of ids [B, S], ascending in a row, as cu_seqlens. Synchronises with the ids' device."""
    places = F.pad(_first_tokens(document_ids), (0, 1), value=document_ids.numel()).to(torch.int32)
    return CuSeqlens(places, int(places.diff().max()))


def _first_tokens(document_ids: Tensor) -> Tensor:
    """Return the first token of each document in a batch [B, S] laid end to end."""
    new_row = torch.ones(len(document_ids), 1, dtype=torch.bool, device=document_ids.device)
    return (
        torch.cat((new_row, document_ids[:, 1:] != document_ids[:, :-1]), dim=1).flatten().nonzero().flatten()
    )


def _merged(bounds: list[int], row: int) -> list[tuple[int, int, bool]]:
    """Return begin and end of each span, and whether the span holds several documents; no span crosses a row's end."""
    spans: list[tuple[int, int, bool]] = []
    for begin, end in pairwise(bounds):
        if spans and begin % row and end - spans[-1][0] <= _SHARED_SPAN:
            spans[-1] = (spans[-1][0], end, True)
        else:
            spans.append((begin, end, False))
    return spans


def _own_document(document_ids: Tensor) -> Tensor:
    """Return the causal mask within documents: ids [..., S] -> bool [..., S, S]."""
    return (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).tril()


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = CAUSAL, *, backend: str = ""
) -> Tensor:
    """Return softmax(scale Q K^T) V where position i sees the keys up to i, aligned at the end.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache, and with a
    prefix); heads is a multiple of kv heads. Returns [B, S, heads, D].

    With a prefix and a window or documents the mask of S x T is materialised, and its masked-out scores are computed
    too. torch has no fused kernel for dropout: mask and probabilities are materialised and kept for the backward. No
    fused kernel, of torch or compiled from csrc/, has a soft cap: plain torch computes it, in chunks of queries if
    there is no dropout mask.

    backend: on an accelerator, the backend of ops/attention_backends.py to use for the calls that it supports.
    """
    window, documents, mask, _, softcap, prefix, sinks = form
    assert sinks is None
    scale = form.factor(query.shape[-1])
    if prefix and window is not None:
        assert documents is None or isinstance(documents, Tensor)
        documents, window = _behind_prefix(query, key, window, documents, prefix), None
    if mask is None and served_on_device(documents, query.device):
        seen = AttentionForm(window, documents, scale=scale, softcap=softcap)
        return attend_on_device(query, key, value, seen, prefer=backend)
    if isinstance(mask, CountedMask):
        mask = mask.draw(query.shape[1], key.shape[1])
    if isinstance(documents, CuSeqlens):
        if mask is not None:
            new = query.shape[1]
            documents = documents_seen(numbered(documents.of_keys, *key.shape[:2]))[:, :, -new:]
        else:
            counts = (each.cu_seqlens.diff().tolist() for each in (documents, documents.of_keys))
            documents = tuple(Span(queries, None, keys) for queries, keys in zip(*counts, strict=True))
    scores = _Scores(scale, softcap, mask)
    if softcap is not None and mask is None and not torch.compiler.is_compiling():
        return _capped(query, key, value, window, documents, scores)
    return _plain(query, key, value, window, documents, scores)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = CAUSAL) -> Tensor:
    """Same as `causal_attention`, by the compiled operator; for unsupported inputs warn once and use torch."""
    complaint = why_not_compiled(query, form)
    if complaint:
        _tell(complaint)
        return causal_attention(query, key, value, form)
    return _packed(query, key, value, form)


def why_not_compiled(query: Tensor, form: AttentionForm = CAUSAL) -> str:
    """Return why the compiled operator cannot compute this call of `causal_attention`; empty if it can."""
    if form.softcap is not None:
        return "it has no soft cap"
    if isinstance(form.mask, Mask):
        return "it takes no mask that is written out"
    if form.documents is not None and not isinstance(form.documents, CuSeqlens):
        return "it takes documents as cu_seqlens only"
    return why_not_packed(query, dropout=form.mask is not None)


def compiled_pays(query: Tensor, key: Tensor, form: AttentionForm) -> bool:
    """Return whether the compiled operator is faster than torch on a CPU, by benchmarks/kernels_attention.py.

    True on an accelerator: there the self-test has timed the operator before it is chosen (selftest/trust.py).

    On a CPU the compiled operator is 4 times as fast as torch with a sliding window, 1.4 times with documents, and 3.7
    times with attention dropout, for which torch has no fused form. Behind earlier keys (blocks of a longer sequence)
    it is 1.3 to 2.5 times as fast, and torch takes a mask of S x T. Plain causal attention in float32 is 1.3 times as
    fast if compiled for AVX-512, and slower for AVX2. Decoding from a cache was not measured.
    """
    if form.mask is not None or query.device.type != "cpu":
        return True
    if form.window is not None or isinstance(form.documents, CuSeqlens):
        return True
    if form.documents is None and 1 < query.shape[1] < key.shape[1]:
        return True
    causal = form.documents is None and query.shape[1] == key.shape[1]
    return causal and query.element_size() >= 4 and extension.built().cpu == "x86-64-v4"


@cache
def _tell(complaint: str) -> None:
    warnings.warn(f"attention is not compiled: {complaint}", stacklevel=3)


def _packed(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    assert not isinstance(form.mask, Mask)
    of_queries, of_keys, longest, longest_key = sequences(query, key, form.documents)
    attended, _ = packed_attention(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        of_queries,
        of_keys,
        max_seqlen_q=longest,
        max_seqlen_k=longest_key,
        window_size=form.window_size,
        scale=form.scale,
        mask=form.mask,
    )
    return attended.view_as(query)


class _Scores(NamedTuple):
    """The transformation of Q K^T into probabilities."""

    scale: float
    softcap: float | None
    mask: Mask | None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Tensor | tuple[Span, ...] | None,
    form: _Scores,
) -> Tensor:
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    if isinstance(documents, tuple):
        return _attention_of_spans(query, key, value, window, documents, form)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    new, total = query.shape[2], key.shape[2]
    seen = None if documents is None else _within(documents, window)
    # A single new token sees all keys; several new tokens after a cache need a mask aligned at the end.
    cut = window is not None and window < total
    if seen is None and (cut or 1 < new < total):
        seen = _seen(new, total, window, query.device)
    return _attended(query, key, value, seen, form).transpose(1, 2)


def _attention_of_spans(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, spans: tuple[Span, ...], form: _Scores
) -> Tensor:
    attended = []
    for *heads, span in _split(query, key, value, spans):
        query_piece, key_piece, value_piece = (each.transpose(0, 1).unsqueeze(0) for each in heads)
        seen, new, total = span.seen, span.length, span.seen_length
        if seen is not None:
            seen = _within(seen, window)
        elif (window is not None and window < total) or 1 < new < total:
            seen = _seen(new, total, window, query.device)
        piece = _attended(query_piece, key_piece, value_piece, seen, form)
        attended.append(piece.squeeze(0).transpose(0, 1))
    return torch.cat(attended).view_as(query)


def _split(query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield query, key and value, [length, heads, D], of each span with queries, and the span."""
    queries, keys = [span.length for span in spans], [span.seen_length for span in spans]
    # One split, not slices: the gradient of each slice would be as large as the whole tensor.
    lengths = (queries, keys, keys)
    pieces = (each.flatten(0, 1).split(of) for each, of in zip((query, key, value), lengths, strict=True))
    return (each for each in zip(*pieces, spans, strict=True) if each[-1].length)


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Tensor | tuple[Span, ...] | None,
    form: _Scores,
) -> Tensor:
    """Compute soft-capped attention in chunks of queries, without S x S memory.

    On a CPU and from 512 tokens on, this is 2.4 to 5 times as fast as all queries at once.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        return chunked_attention(
            query, key, value, VisibleKeys(window, seen), scale=form.scale, softcap=form.softcap
        )

    if not isinstance(documents, tuple):
        return attend(query, key, value, documents)
    attended = []
    for *heads, span in _split(query, key, value, documents):
        query_piece, key_piece, value_piece = (each.unsqueeze(0) for each in heads)
        attended.append(attend(query_piece, key_piece, value_piece, span.seen).squeeze(0))
    return torch.cat(attended).view_as(query)


def _within(seen: Tensor, window: int | None) -> Tensor:
    """Return a mask [..., S, T] restricted to the window; positions are aligned at the end."""
    new, total = seen.shape[-2:]
    return seen if window is None else seen.triu(total - new - window + 1)


def _seen(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of the last `new` positions, restricted to the window: bool [new, total]."""
    seen = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def _behind_prefix(query: Tensor, key: Tensor, window: int, documents: Tensor | None, prefix: int) -> Tensor:
    """Return the mask of a window and documents, bool [S, T] or [B, 1, S, T], that hides no key of the prefix."""
    new, total = query.shape[1], key.shape[1]
    seen = _seen(new, total, window, query.device)
    seen[:, :prefix] = True
    return seen if documents is None else documents & seen


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    form: _Scores,
) -> Tensor:
    """Attend with heads first: query [B, heads, S, D], key and value [B, heads, T, D] -> [B, heads, S, D].

    seen: bool mask [B, S, T]; None: causal if S = T, else no mask.
    """
    new, total = query.shape[2], key.shape[2]
    if form.mask is None and form.softcap is None:
        causal = seen is None and new == total
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=causal, scale=form.scale
        )
    if seen is None:
        seen = _seen(new, total, None, query.device)
    scores = torch.matmul(query * form.scale, key.transpose(2, 3))
    compute_dtype = torch.promote_types(scores.dtype, torch.float32)
    if form.softcap is not None:
        scores = soft_capped(scores.to(compute_dtype), form.softcap)
    probabilities = (
        scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=compute_dtype).to(query.dtype)
    )
    return torch.matmul(dropout(probabilities, form.mask), value)
