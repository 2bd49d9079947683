"""Attention of a block of queries to a block of keys, and the merge of blocks by their log-sum-exps.

The arithmetic of ring attention (Liu et al., "Ring attention with blockwise transformers", 2023), without its messages,
which parallel/context_ring.py sends. Softmax over all keys is the sum of those over parts of them, each weighted by the
exponential of its log-sum-exp. A block's gradients need the output and the log-sum-exp of all keys, and no other block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.ops.activations import cap_with_slope
from megalite.ops.attention_form import AttentionForm
from megalite.ops.chunked_attention import group_heads, pieces, ungroup_heads
from megalite.ops.documents import CuSeqlens, block_cu_seqlens, equal_cu_seqlens, first_key, numbered
from megalite.ops.dropout import CountedMask, Mask, dropout
from megalite.ops.packed_attention import BlockPositions, PackedForm, packed_block, packed_gradients


class AttentionBlock(NamedTuple):
    """The positions of a block's queries, and those of its keys, the same in each of the B rows."""

    queries: range
    keys: range


@dataclass(frozen=True)
class BlockForm:
    """Causal attention over `rows` rows of `length` positions, computed block by block.

    form: documents as cu_seqlens of the whole rows, dropout as CountedMask, no prefix. compiled: by the compiled
    operator, which has no soft cap; else in plain torch, a chunk of queries at a time.
    """

    form: AttentionForm
    rows: int
    length: int
    compiled: bool = False

    def __post_init__(self) -> None:
        documents, mask, prefix = self.form.documents, self.form.mask, self.form.prefix
        if prefix or not isinstance(documents, CuSeqlens | None) or not isinstance(mask, CountedMask | None):
            raise ValueError("attention by blocks takes documents as CuSeqlens, a CountedMask and no prefix")

    @cached_property
    def document_ids(self) -> Tensor | None:
        """The number of each position's document, [rows, length], from 1 in the first row."""
        documents = self.form.documents
        return numbered(documents, self.rows, self.length) if isinstance(documents, CuSeqlens) else None

    def first_key(self, queries: range) -> int:
        """Return a position before which these queries see no key: that of the window or of their documents."""
        window, documents = self.form.window, self.form.documents
        first = 0 if window is None else max(0, queries.start - window + 1)
        if documents is None:
            return first
        return max(first, first_key(documents, self.rows, self.length, queries.start))

    def sees(self, block: AttentionBlock) -> bool:
        """Return whether a query of the block may see a key of it."""
        return block.keys.start < block.queries.stop and self.first_key(block.queries) < block.keys.stop


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, form: BlockForm
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale Q K^T) V over the block's keys, [B, n, heads, D], and its log-sum-exp, [heads, B, n].

    query: [B, n, heads, D]; key, value: [B, m, kv heads, D]; heads is a multiple of kv heads. The log-sum-exp is at
    least float32; 0 and -inf for a query that sees no key of the block.
    """
    if form.compiled:
        output, lse = packed_block(*_flat(query, key, value), _packed_form(query, block, form))
        return output.view_as(query), lse.view(-1, *query.shape[:2])
    heads, groups = query.shape[2], key.shape[2]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full(
        (heads, *query.shape[:2]), -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32)
    )
    for chunk in _chunks(query, key, block, form):
        scores, _ = chunk.scores(query, key)
        own = scores.logsumexp(-1)
        probabilities = torch.exp(scores - _no_infinity(own, 0.0).unsqueeze(-1))
        weights = dropout(probabilities, chunk.mask(scores))
        values = value[chunk.rows, chunk.keys].transpose(1, 2)
        output[chunk.rows, chunk.queries] = ungroup_heads(
            torch.matmul(weights.to(query.dtype), values), heads
        )
        own = own.unflatten(2, (heads // groups, -1)).flatten(1, 2)
        lse[:, chunk.rows, chunk.queries] = own.transpose(0, 1)
    return output, lse


def merge_block(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
    """Add the results of `attend_block` over further keys to those over earlier ones, in place.

    output: [B, n, heads, D] in the type of lse; 0 and -inf before the first block.
    """
    total = torch.logaddexp(lse, block_lse)
    base = _no_infinity(total, 0.0)
    kept, added = ((part - base).exp_().permute(1, 2, 0).unsqueeze(-1) for part in (lse, block_lse))
    output.mul_(kept).addcmul_(block_output.to(output.dtype), added)
    lse.copy_(total)


def block_gradients(
    output_grad: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    block: AttentionBlock,
    form: BlockForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of `heads`: query, key and value as for `attend_block`.

    results: output [B, n, heads, D] and log-sum-exp [heads, B, n] of all keys that the queries see.
    """
    query, key, value = heads
    if form.compiled:
        flat_grad, flat_output = (each.flatten(0, 1).contiguous() for each in (output_grad, results[0]))
        grads = packed_gradients(
            flat_grad,
            _flat(query, key, value),
            (flat_output, results[1].flatten(1)),
            _packed_form(query, block, form),
        )
        of_query, of_key, of_value = (grad.view(each.shape) for grad, each in zip(grads, heads, strict=True))
        return of_query, of_key, of_value
    return _plain_gradients(output_grad, heads, results, block, form)


def _plain_gradients(
    output_grad: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    block: AttentionBlock,
    form: BlockForm,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = heads
    count, groups, compute_dtype = query.shape[2], key.shape[2], results[1].dtype
    query_grad = torch.zeros_like(query, dtype=compute_dtype, memory_format=torch.contiguous_format)
    key_grad, value_grad = (
        torch.zeros_like(each.transpose(1, 2), dtype=compute_dtype, memory_format=torch.contiguous_format)
        for each in (key, value)
    )
    for chunk in _chunks(query, key, block, form):
        places = chunk.rows, chunk.queries
        scores, slopes = chunk.scores(query, key, slopes=True)
        lse = results[1][:, chunk.rows, chunk.queries].transpose(0, 1).unflatten(1, (groups, -1)).flatten(2)
        # A query without keys has the log-sum-exp -inf: infinity makes its probabilities 0.
        probabilities = torch.exp(scores - _no_infinity(lse, torch.inf).unsqueeze(-1))
        grads = group_heads(output_grad[places], groups)
        delta = (grads * group_heads(results[0][places], groups)).sum(-1, keepdim=True, dtype=compute_dtype)
        mask = chunk.mask(scores)
        weights = dropout(probabilities, mask).to(query.dtype)
        value_grad[chunk.rows, :, chunk.keys] += torch.matmul(weights.transpose(2, 3), grads)
        of_weights = torch.matmul(grads, value[chunk.rows, chunk.keys].permute(0, 2, 3, 1)).to(compute_dtype)
        score_grad = dropout(of_weights, mask).sub_(delta).mul_(probabilities)
        if slopes is not None:
            score_grad.mul_(slopes)
        score_grad = score_grad.to(query.dtype)
        of_query = torch.matmul(score_grad, key[chunk.rows, chunk.keys].transpose(1, 2))
        query_grad[places] = ungroup_heads(of_query, count).mul(chunk.scale)
        of_key = torch.matmul(score_grad.transpose(2, 3), group_heads(query[places], groups))
        key_grad[chunk.rows, :, chunk.keys] += of_key.mul_(chunk.scale)
    return query_grad, key_grad.transpose(1, 2), value_grad.transpose(1, 2)


@dataclass(frozen=True)
class _Chunk:
    """Some rows and queries of a block, as slices of the block's tensors, and the keys that they may see."""

    rows: slice
    queries: slice
    keys: slice
    places: AttentionBlock
    form: BlockForm
    scale: float

    def scores(self, query: Tensor, key: Tensor, *, slopes: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the scores, -inf where masked: [rows, kv heads, group * queries, keys], at least float32.

        slopes: the soft cap's derivatives too, where there is one.
        """
        own = group_heads(query[self.rows, self.queries], key.shape[2]) * self.scale
        scores = torch.matmul(own, key[self.rows, self.keys].permute(0, 2, 3, 1))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        softcap, slope = self.form.form.softcap, None
        if softcap is not None and slopes:
            slope = cap_with_slope(scores, softcap)
        elif softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        # Dim 2 holds the heads of a group one after another.
        by_query = scores.unflatten(2, (-1, len(self.places.queries)))
        by_query.masked_fill_(~self._seen(scores.device), -torch.inf)
        return scores, slope

    def _seen(self, device: torch.device) -> Tensor:
        """Return the visible keys, broadcastable to [rows, kv heads, group, queries, keys]."""
        queries, keys = self.places
        place = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
        key_place = torch.arange(keys.start, keys.stop, device=device)
        window, ids = self.form.form.window, self.form.document_ids
        seen = key_place <= place
        if window is not None:
            seen &= key_place > place - window
        if ids is None:
            return seen
        ids = ids[self.rows]
        own, of_keys = ids[:, queries.start : queries.stop], ids[:, keys.start : keys.stop]
        return (seen & (own.unsqueeze(2) == of_keys.unsqueeze(1))).unsqueeze(1).unsqueeze(1)

    def mask(self, scores: Tensor) -> Mask | None:
        """Return the dropout mask, in the shape of the scores."""
        mask = self.form.form.mask
        if not isinstance(mask, CountedMask):
            return None
        drawn = mask._replace(sample_indices=mask.sample_indices[self.rows]).draw_block(*self.places)
        return drawn._replace(keep=drawn.keep.view_as(scores))


def _chunks(query: Tensor, key: Tensor, block: AttentionBlock, form: BlockForm) -> Iterator[_Chunk]:
    """Yield the chunks of a block of which a query may see a key."""
    for rows, queries in pieces(query, key):
        places = block.queries[queries]
        begin, end = max(block.keys.start, form.first_key(places)), min(block.keys.stop, places.stop)
        if begin < end:
            keys = slice(begin - block.keys.start, end - block.keys.start)
            seen = AttentionBlock(places, range(begin, end))
            yield _Chunk(rows, queries, keys, seen, form, form.form.factor(query.shape[-1]))


def _flat(*heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.flatten(0, 1) for each in heads)
    return query, key, value


def _packed_form(query: Tensor, block: AttentionBlock, form: BlockForm) -> PackedForm:
    documents, mask, rows = form.form.documents, form.form.mask, len(query)
    assert isinstance(mask, CountedMask | None)
    longest_query, longest_key = len(block.queries), len(block.keys)
    if isinstance(documents, CuSeqlens):
        of_queries, of_keys = (block_cu_seqlens(documents.cu_seqlens, form.length, each) for each in block)
        longest_query, longest_key = (min(documents.max_seqlen, len(each)) for each in block)
    else:
        of_queries, of_keys = (equal_cu_seqlens(rows, len(each), query.device) for each in block)
    return PackedForm(
        of_queries,
        of_keys,
        longest_query,
        longest_key,
        form.form.window_size,
        form.form.factor(query.shape[-1]),
        mask=mask,
        positions=BlockPositions(rows, block.queries.start, block.keys.start),
    )


def _no_infinity(values: Tensor, instead: float) -> Tensor:
    """Return the values with `instead` in place of -inf."""
    return values.masked_fill(values == -torch.inf, instead)
