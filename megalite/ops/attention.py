"""Scaled dot-product attention with grouped key-value heads (Ainslie et al., "GQA", 2023)."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops import extension
from megalite.ops.attention_backends import attend_on_device, served_on_device
from megalite.ops.chunked_attention import Visible, chunked_attention
from megalite.ops.documents import Documents, Span, Starts, equal_starts, numbered
from megalite.ops.dropout import CountedMask, Mask, dropout
from megalite.ops.packed_attention import packed_attention, why_not_packed
from megalite.ops.softcap import soft_capped

# Neighbouring documents that have no more tokens together are attended to at once: a call costs more than their square.
_SHARED_SPAN = 64


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
    bounds = [*_first_tokens(document_ids).tolist(), document_ids.numel()]
    spans: list[Span] = []
    flat = document_ids.flatten()
    for begin, end, several in _merged(bounds, document_ids.shape[1]):
        spans.append(Span(end - begin, _own_document(flat[begin:end]) if several else None))
    return tuple(spans)


def document_starts(document_ids: Tensor) -> Starts:
    """[B, S], ascending in a row -> where documents begin. Waits for the ids where they are on a device."""
    places = F.pad(_first_tokens(document_ids), (0, 1), value=document_ids.numel()).to(torch.int32)
    return Starts(places, int(places.diff().max()))


def _first_tokens(document_ids: Tensor) -> Tensor:
    """Of each document, in a batch [B, S] laid end to end."""
    new_row = torch.ones(len(document_ids), 1, dtype=torch.bool, device=document_ids.device)
    return (
        torch.cat((new_row, document_ids[:, 1:] != document_ids[:, :-1]), dim=1).flatten().nonzero().flatten()
    )


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
    mask: Mask | CountedMask | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "",
) -> Tensor:
    """softmax(scale Q K^T) V where position i sees the keys up to i, aligned at the end.

    query: [B, S, heads, D]; key, value: [B, T, kv heads, D] with T >= S (T > S while decoding from a cache);
    heads is a multiple of kv heads. window: it sees so many of them, itself included
    (Beltagy et al. 2020). Returns [B, S, heads, D].

    documents: where T = S, it sees those of its own document only; spans only where no `mask` is given.

    mask: [B, heads, S, T], of the probabilities to drop. The compiled operator draws a counted one as it goes. torch
    has no fused kernel for either: mask and probabilities are written out, and two matrices kept for the backward.

    scale: 1 / sqrt(D) by default. softcap: scores become softcap * tanh(score / softcap), which neither torch's
    fused kernels nor ours have: plain torch computes them, a chunk of queries at a time where no `mask` is given.

    backend: on an accelerator, the one of ops/attention_backends.py that serves where it can.
    """
    form = _Scores(query.shape[-1] ** -0.5 if scale is None else scale, softcap)
    if mask is None and served_on_device(documents, query.device):
        return attend_on_device(
            query, key, value, window, documents, scale=form.scale, softcap=softcap, prefer=backend
        )
    if isinstance(mask, CountedMask):
        mask = mask.draw(query.shape[1], key.shape[1])
    if isinstance(documents, Starts):
        if mask is not None:
            documents = documents_seen(numbered(documents, *query.shape[:2]))
        else:
            documents = tuple(map(Span, documents.places.diff().tolist()))
    if form.softcap is not None and mask is None and not torch.compiler.is_compiling():
        return _capped(query, key, value, window, documents, form)
    return _plain(query, key, value, window, documents, form, mask)


def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    mask: Mask | CountedMask | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As of `causal_attention`, by the compiled operator; what it cannot do is said once, and torch computes it."""
    complaint = why_not_compiled(query, mask, documents, softcap)
    if complaint:
        _tell(complaint)
        form: dict[str, Any] = {"window": window, "mask": mask, "documents": documents}
        return causal_attention(query, key, value, **form, scale=scale, softcap=softcap)
    assert not isinstance(mask, Mask)
    return _packed(query, key, value, window, documents, mask, scale)


def why_not_compiled(
    query: Tensor,
    mask: Mask | CountedMask | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
) -> str:
    """Why the compiled operator cannot serve `causal_attention`; empty where it can."""
    if softcap is not None:
        return "it has no soft cap"
    if isinstance(mask, Mask):
        return "it takes no mask that is written out"
    if documents is not None and not isinstance(documents, Starts):
        return "it takes documents by their starts only"
    return why_not_packed(query, dropout=mask is not None)


def compiled_pays(
    query: Tensor,
    key: Tensor,
    window: int | None,
    documents: Documents | None,
    mask: Mask | CountedMask | None = None,
) -> bool:
    """Whether the compiled operator is the faster one on a CPU: benchmarks/kernels_attention.py. An accelerator has its
    own measurement (ops/trust.py), without which nobody asks.

    On a CPU it is 4 times as fast as torch with the mask of a window, 1.4 times with documents. Where a token sees all
    earlier ones it is 1.3 times as fast in float32 compiled for AVX-512, and slower for AVX2; with a cache neither was
    measured. Where probabilities are dropped torch has no fused form at all: it is 3.7 times as fast.
    """
    if mask is not None:
        return True
    if query.device.type != "cpu":
        return True  # there only what was measured to be the faster one is asked for
    if window is not None or isinstance(documents, Starts):
        return True
    causal = documents is None and query.shape[1] == key.shape[1]
    return causal and query.element_size() >= 4 and extension.built().cpu == "x86-64-v4"


@cache
def _tell(complaint: str) -> None:
    warnings.warn(f"attention is not compiled: {complaint}", stacklevel=3)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Documents | None,
    mask: CountedMask | None,
    scale: float | None,
) -> Tensor:
    (rows, new), total = query.shape[:2], key.shape[1]
    if isinstance(documents, Starts):
        starts = (documents.places, documents.places)
        new = total = documents.longest
    else:
        of_queries = equal_starts(rows, new, query.device)
        starts = of_queries, of_queries if total == new else equal_starts(rows, total, query.device)
    attended, _ = packed_attention(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        starts[0],
        starts[1],
        longest_query=new,
        longest_key=total,
        left=-1 if window is None else window - 1,
        right=0,
        scale=scale,
        mask=mask,
    )
    return attended.view_as(query)


@dataclass(frozen=True)
class _Scores:
    """What becomes of queries times keys."""

    scale: float
    softcap: float | None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Tensor | tuple[Span, ...] | None,
    form: _Scores,
    mask: Mask | None,
) -> Tensor:
    grouped = query.shape[2] // key.shape[2]
    if grouped > 1:
        key, value = key.repeat_interleave(grouped, dim=2), value.repeat_interleave(grouped, dim=2)
    if isinstance(documents, tuple):
        return _attention_of_spans(query, key, value, window, documents, form)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    new, total = query.shape[2], key.shape[2]
    seen = None if documents is None else _within(documents, window)
    # One new token sees everything; a longer piece after a cache needs the mask aligned at the end.
    cut = window is not None and window < total
    if seen is None and (cut or 1 < new < total):
        seen = _seen(new, total, window, query.device)
    return _attended(query, key, value, seen, form, mask).transpose(1, 2)


def _attention_of_spans(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, spans: tuple[Span, ...], form: _Scores
) -> Tensor:
    attended = []
    for *heads, (length, seen) in _split(query, key, value, spans):
        query_piece, key_piece, value_piece = (each.transpose(0, 1).unsqueeze(0) for each in heads)
        if window is not None and window < length:
            seen = _seen(length, length, window, query.device) if seen is None else _within(seen, window)
        piece = _attended(query_piece, key_piece, value_piece, seen, form)
        attended.append(piece.squeeze(0).transpose(0, 1))
    return torch.cat(attended).view_as(query)


def _split(query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...]) -> Iterator[tuple[Any, ...]]:
    """Query, key and value of each span, [length, heads, D], and the span itself."""
    lengths = [span.length for span in spans]
    # Split and joined whole: the gradients of slices would each be as large as all.
    pieces = (each.flatten(0, 1).split(lengths) for each in (query, key, value))
    return zip(*pieces, spans, strict=True)


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Tensor | tuple[Span, ...] | None,
    form: _Scores,
) -> Tensor:
    """Soft-capped, in chunks of queries: on a CPU 2.4 to 5 times as fast as all queries at once from 512 tokens on, and
    without their S x S memory."""

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        visible = Visible(window, seen)
        return chunked_attention(query, key, value, visible, scale=form.scale, softcap=form.softcap)

    if not isinstance(documents, tuple):
        return attend(query, key, value, documents)
    attended = []
    for *heads, (_, seen) in _split(query, key, value, documents):
        query_piece, key_piece, value_piece = (each.unsqueeze(0) for each in heads)
        attended.append(attend(query_piece, key_piece, value_piece, seen).squeeze(0))
    return torch.cat(attended).view_as(query)


def _within(seen: Tensor, window: int | None) -> Tensor:
    """[..., S, S], cut to the window."""
    return seen if window is None else seen.triu(1 - window)


def _seen(new: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [new, total] each of the last `new` positions sees."""
    seen = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    return seen if window is None else seen.triu(total - new - window + 1)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    form: _Scores,
    mask: Mask | None = None,
) -> Tensor:
    """[B, heads, S or T, D] -> [B, heads, S, D]; seen: None where S = T for all up to a query, else for all."""
    new, total = query.shape[2], key.shape[2]
    if mask is None and form.softcap is None:
        causal = seen is None and new == total
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=causal, scale=form.scale
        )
    if seen is None:
        seen = _seen(new, total, None, query.device)
    scores = torch.matmul(query * form.scale, key.transpose(2, 3))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if form.softcap is not None:
        scores = soft_capped(scores.to(wide), form.softcap)
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=wide).to(query.dtype)
    return torch.matmul(dropout(probabilities, mask), value)
