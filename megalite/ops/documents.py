"""The documents of a batch, in the forms that attention kernels take."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Span(NamedTuple):
    """Consecutive tokens of a batch laid end to end: one document, or several whole short documents.

    seen: bool [length, length], which tokens of the span each token sees; None for one document (causal).
    """

    length: int
    seen: Tensor | None = None


@dataclass(frozen=True)
class CuSeqlens:
    """The documents of a batch laid end to end, in the form of variable-length kernels.

    cu_seqlens: [documents + 1] int32, ascending: the first token of each document, then the number of tokens. Two equal
    neighbours are a document without tokens. max_seqlen: an upper bound of a document's length, in tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int


# The documents of [B, S] tokens: a bool mask [B, 1, S, S] of the keys that each token sees, spans in order, or
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


def numbered(starts: CuSeqlens, rows: int, length: int) -> Tensor:
    """Return the number of each token's document: [rows, length] int64; without a device sync."""
    tokens = torch.arange(rows * length, dtype=torch.int32, device=starts.cu_seqlens.device)
    return torch.searchsorted(starts.cu_seqlens, tokens, right=True).view(rows, length)
