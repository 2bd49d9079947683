"""The documents of a batch, in the forms that attention kernels take."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Span(NamedTuple):
    """Consecutive tokens of a batch laid end to end: one document, or several whole short documents.

    seen: bool [length, keys], which tokens of the span each token sees; None for one document (causal).
    keys: the tokens that are keys, where only the last `length` of them are queries; None: all.
    """

    length: int
    seen: Tensor | None = None
    keys: int | None = None

    @property
    def seen_length(self) -> int:
        """The number of keys."""
        return self.length if self.keys is None else self.keys


@dataclass(frozen=True)
class CuSeqlens:
    """The documents of a batch laid end to end, in the form of variable-length kernels.

    cu_seqlens: [documents + 1] int32, ascending: the first token of each document, then the number of tokens. Two equal
    neighbours are a document without tokens. max_seqlen: an upper bound of a document's length, in tokens.
    keys: those of the keys, where queries are the last tokens of documents only, or none; None: the same.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    keys: "CuSeqlens | None" = None

    @property
    def of_keys(self) -> "CuSeqlens":
        return self.keys or self


# The documents of [B, S] tokens: a bool mask [B, 1, S, T] of the keys that each token sees, spans in order, or
# cu_seqlens.
Documents = Tensor | tuple[Span, ...] | CuSeqlens


def row_cu_seqlens(document_ids: Tensor) -> Tensor:
    """Return the first token of each document within its row: ids [B, S], ascending in a row -> [B, documents] int32.

    The row with most documents decides the width; the other rows are padded with S: documents without tokens. Call this
    while the ids are on the host: on a device it synchronises. Its rows split into micro batches like the ids.
    """
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    places = torch.full(
        (len(begins), int(begins.sum(dim=1).max())), begins.shape[1], dtype=torch.int32, device=begins.device
    )
    rows, columns = begins.nonzero(as_tuple=True)
    places[rows, begins.cumsum(dim=1)[rows, columns] - 1] = columns.int()
    return places


def longest_document(places: Tensor, length: int) -> int:
    """Return the tokens of the longest document of `row_cu_seqlens`, in rows of `length` tokens; on the host."""
    return int(F.pad(places, (0, 1), value=length).diff().max())


def document_lengths(document_ids: Tensor) -> Tensor:
    """Return the number of tokens of each token's document: ids [B, S], from 0 in each row -> [B, S] int64."""
    counts = torch.zeros_like(document_ids).scatter_add_(1, document_ids, torch.ones_like(document_ids))
    return counts.gather(1, document_ids)


def equal_cu_seqlens(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the cu_seqlens [rows + 1] int32 of rows of `length` tokens each, laid end to end."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device).mul_(length)


def packed_cu_seqlens(places: Tensor, length: int, longest: int | None = None) -> CuSeqlens:
    """Return `row_cu_seqlens` of rows of `length` tokens as cu_seqlens of the rows laid end to end.

    longest: at least the tokens of the longest document; default: a row's length, since a look at `places` would be a
    device sync. A kernel starts a block for each tile of so many tokens in every document.
    """
    rows = torch.arange(len(places), dtype=torch.int32, device=places.device)
    flat = (places + (rows * length).unsqueeze(1)).flatten()
    return CuSeqlens(F.pad(flat, (0, 1), value=len(places) * length), longest or length)


def block_cu_seqlens(cu_seqlens: Tensor, length: int, positions: range) -> Tensor:
    """Return the cu_seqlens of a block: of these positions of each row of `length` tokens, laid end to end.

    As many documents as before; one that lies outside of the block has no tokens. Without a device sync.
    """
    rows = cu_seqlens // length
    offsets = (cu_seqlens - rows * length - positions.start).clamp_(0, len(positions))
    return offsets.add_(rows * len(positions))


def numbered(starts: CuSeqlens, rows: int, length: int) -> Tensor:
    """Return the number of each token's document: [rows, length] int64; without a device sync."""
    tokens = torch.arange(rows * length, dtype=torch.int32, device=starts.cu_seqlens.device)
    return torch.searchsorted(starts.cu_seqlens, tokens, right=True).view(rows, length)


def documents_of_block(
    documents: Documents, length: int, block: range, prefix: int = 0, *, first: int = 0
) -> Documents:
    """Return the documents of rows of `length` tokens for the queries `block` of each row and its keys up to their end.

    Without a device sync. prefix: keys in front of each row, in a mask. first: keys before it are left out.
    """
    if isinstance(documents, Tensor):
        return documents[:, :, block.start : block.stop, first : prefix + block.stop]
    if isinstance(documents, tuple):
        return tuple(_spans_of_block(documents, length, block, first))
    keys = range(first, block.stop)
    of_queries, of_keys = (block_cu_seqlens(documents.cu_seqlens, length, each) for each in (block, keys))
    longest = documents.max_seqlen
    return CuSeqlens(of_queries, min(longest, len(block)), CuSeqlens(of_keys, min(longest, len(keys))))


def first_key(documents: Documents, rows: int, length: int, start: int) -> int:
    """Return a key before which no row's queries from `start` on see one: the earliest first key of their documents.

    0 where an answer would be a device sync, and for spans or masks of several rows.
    """
    if isinstance(documents, CuSeqlens) and documents.cu_seqlens.device.type == "cpu":
        begins = torch.arange(rows, dtype=torch.int32) * length
        number = torch.searchsorted(documents.cu_seqlens, begins + start, right=True)
        return int((documents.cu_seqlens[number - 1] - begins).min())
    if isinstance(documents, tuple) and rows == 1:
        starts = accumulate((span.length for span in documents), initial=0)
        return max(place for place in starts if place <= start)
    return 0


def _spans_of_block(spans: tuple[Span, ...], length: int, block: range, first: int) -> Iterator[Span]:
    end = 0
    for span in spans:
        start = end % length
        end += span.length
        keys = min(span.length, block.stop - start)
        if keys <= 0 or start < first:
            continue
        queries = max(0, min(keys, start + keys - block.start))
        seen = None if span.seen is None or not queries else span.seen[keys - queries : keys, :keys]
        yield Span(queries, seen, keys)


def documents_of_row(documents: Documents, length: int, row: int) -> Documents:
    """Return the documents of one of the rows of `length` tokens; without a device sync."""
    if isinstance(documents, Tensor):
        return documents[row : row + 1]
    if isinstance(documents, CuSeqlens):
        places = documents.cu_seqlens.clamp(row * length, (row + 1) * length) - row * length
        return CuSeqlens(places, documents.max_seqlen)
    ends = accumulate(span.length for span in documents)
    return tuple(
        span for span, end in zip(documents, ends, strict=True) if row * length < end <= (row + 1) * length
    )
