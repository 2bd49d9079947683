"""Attention over rows that are cut over the context-parallel ranks. Each method says what of a row travels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import Operators
from megalite.ops.documents import documents_of_block, documents_of_row, first_key
from megalite.ops.dropout import CountedMask
from megalite.parallel.context import ContextRows
from megalite.parallel.context_ring import ring_attention
from megalite.topology.context import ContextMethod, key_value_copies, zig_zag

ContextAttention = Callable[..., Tensor]
"""Attention of this rank's tokens: (ops, query [B, S / c, heads, D], key, value [B, S / c, kv heads, D], form, rows)
-> [B, S / c, heads, D], all in the order of the rank's blocks.

ops: `attend` computes attention over tokens in order. form: that of whole rows: its documents are of [B, S] tokens, its
mask counts positions in the row. Collective over the ranks of the rows: each makes the same ones, whatever its tokens.
"""


def gather_attention(
    ops: Operators, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, rows: ContextRows
) -> Tensor:
    """As `ContextAttention`: all keys and values are gathered, and their gradients reduce-scattered.

    Each block of queries is one call of `attend` with the keys up to its end ("aligned at the end").
    """
    packed = rows.gathered(torch.cat((key, value), dim=2))
    if rows.prefix is not None:
        packed = torch.cat((rows.prefix.flatten(1, 2).expand(len(packed), -1, -1, -1), packed), dim=1)
    if len(rows.blocks) == 1:
        return _attend_blocks(ops, query, packed, form, rows, rows.blocks[0])
    # Split: each slice would have a gradient as large as the whole.
    each_row = zip(query.split(1), packed.split(1), rows.blocks, strict=True)
    attended = [
        _attend_blocks(ops, own, seen, _form_of_row(form, rows.length, row), rows, blocks)
        for row, (own, seen, blocks) in enumerate(each_row)
    ]
    return torch.cat(attended)


def _attend_blocks(
    ops: Operators,
    query: Tensor,
    packed: Tensor,
    form: AttentionForm,
    rows: ContextRows,
    blocks: tuple[int, ...],
) -> Tensor:
    """Attend from these blocks of queries. packed: keys over values of whole rows, [B, prefix + S, 2 * kv heads, D]."""
    attended = []
    queries = [range(number * rows.block_length, (number + 1) * rows.block_length) for number in blocks]
    keys = [
        range(_first_key(form, block, len(packed), rows.length), form.prefix + block.stop)
        for block in queries
    ]
    seen = _KeyRanges.apply(packed, keys)  # type: ignore[no-untyped-call]
    parts = query.split(rows.block_length, dim=1)
    for part, block, own, keys_and_values in zip(parts, queries, keys, seen, strict=True):
        key, value = keys_and_values.chunk(2, dim=2)
        of_block = form
        if form.documents is not None:
            documents = documents_of_block(form.documents, rows.length, block, form.prefix, first=own.start)
            of_block = form._replace(documents=documents)
        attended.append(ops.attend(part, key, value, of_block))
    return torch.cat(attended, dim=1)


def _first_key(form: AttentionForm, block: range, rows: int, length: int) -> int:
    """Return the first key that a block of queries sees, where the host knows it; else 0."""
    if form.mask is not None or form.prefix:
        return 0  # dropout counts keys from the row's start
    if form.documents is not None:
        # Not the window's: a document must keep all its keys, by whose end its queries are aligned.
        return first_key(form.documents, rows, length, block.start)
    return 0 if form.window is None else max(0, block.start - form.window + 1)


class _KeyRanges(torch.autograd.Function):
    """Several ranges of tokens of [B, T, ...]. Each slice would have a gradient as large as the whole."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, ranges: Sequence[range]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.ranges = packed.shape, ranges
        return tuple(packed[:, own.start : own.stop] for own in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for grad, own in zip(grads, ctx.ranges, strict=True):
            total[:, own.start : own.stop] += grad
        return total, None


def _form_of_row(form: AttentionForm, length: int, row: int) -> AttentionForm:
    """Return the form of attention in one of the rows."""
    documents, mask = form.documents, form.mask
    if documents is not None:
        documents = documents_of_row(documents, length, row)
    if isinstance(mask, CountedMask):
        mask = mask._replace(sample_indices=mask.sample_indices[row : row + 1])
    return form._replace(documents=documents, mask=mask)


def ulysses_attention(
    ops: Operators, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, rows: ContextRows
) -> Tensor:
    """As `ContextAttention`: ranks change tokens for heads, attend over whole rows, and change back.

    The number of query heads must be divisible by the ranks; key-value heads are repeated where they are not.
    """
    size, rank = rows.ranks.size, rows.ranks.rank
    heads, kv_heads = query.shape[2] // size, key.shape[2]
    repeats = key_value_copies(query.shape[2], kv_heads, size)
    key, value = (each.repeat_interleave(repeats, dim=2) if repeats > 1 else each for each in (key, value))
    by_rank = [each.unflatten(2, (size, -1)) for each in (query, key, value)]
    whole = rows.to_heads(torch.cat(by_rank, dim=3).flatten(2, 3))
    query, key, value = whole.split([each.shape[3] for each in by_rank], dim=2)
    if rows.prefix is not None:
        prefix = rows.prefix.repeat_interleave(repeats, dim=2).unflatten(2, (size, -1))[:, :, rank]
        own = prefix.expand(len(key), -1, -1, -1, -1).unbind(2)
        key, value = (torch.cat(pair, dim=1) for pair in zip(own, (key, value), strict=True))
    mask = form.mask
    if isinstance(mask, CountedMask):
        first = mask.heads.start + rank * heads
        mask = mask._replace(heads=range(first, first + heads))
    sinks = None if form.sinks is None else form.sinks[rank * heads : (rank + 1) * heads]
    return rows.to_tokens(ops.attend(query, key, value, form._replace(mask=mask, sinks=sinks)))


def through_ring(
    ops: Operators, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, rows: ContextRows
) -> Tensor:
    """As `ContextAttention`: keys and values go from rank to rank while blocks are computed (`parallel.context_ring`).

    For rows that are cut zig-zag and have no prefix.
    """
    if rows.blocks != (zig_zag(rows.ranks.size)[rows.ranks.rank],) or rows.prefix is not None:
        raise ValueError("ring attention is for rows that are all cut zig-zag, without a prefix")
    blocks = ops.blocks(query, form._replace(sinks=None), rows.length)
    return ring_attention(query, key, value, form.sinks, blocks, rows.ranks)


METHODS: Mapping[ContextMethod, ContextAttention] = {
    "gather": gather_attention,
    "ring": through_ring,
    "ulysses": ulysses_attention,
}
