"""Which tokens of a batch belong to one document, in the forms that attention takes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Span(NamedTuple):
    """A run of the tokens of a batch laid end to end: one document, or several whole short ones.

    seen: [length, length], which of them each one sees; None where it is one document.
    """

    length: int
    seen: Tensor | None = None


@dataclass(frozen=True)
class Starts:
    """Where each document of a batch laid end to end begins, and the end: [documents + 1] int32, ascending; and an
    upper bound of a document's length.

    The cu_seqlens and max_seqlen of variable-length kernels. Two equal neighbours are a document without tokens.
    """

    places: Tensor
    longest: int


# What tells the documents of [B, S] tokens apart: [B, 1, S, S], which keys each token sees; or all spans in order; or
# their starts.
Documents = Tensor | tuple[Span, ...] | Starts


def row_starts(document_ids: Tensor) -> Tensor:
    """Where each document of a row begins in it: [B, S], ascending in a row -> [B, documents] int32.

    As wide as the row with most documents needs; the other rows end in documents without tokens, which begin at S.
    Call it while the ids are on the host: it waits for them on a device. Its rows split into micro batches like ids.
    """
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    places = torch.full(
        (len(begins), int(begins.sum(dim=1).max())), begins.shape[1], dtype=torch.int32, device=begins.device
    )
    rows, columns = begins.nonzero(as_tuple=True)
    places[rows, begins.cumsum(dim=1)[rows, columns] - 1] = columns.int()
    return places


def equal_starts(rows: int, length: int, device: torch.device) -> Tensor:
    """The cu_seqlens [rows + 1] int32 of rows of one length, laid end to end."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device).mul_(length)


def starts_of_rows(places: Tensor, length: int) -> Starts:
    """`row_starts` of rows of `length` tokens, laid end to end; waits for no device, so a row's length is the bound."""
    rows = torch.arange(len(places), dtype=torch.int32, device=places.device)
    flat = (places + (rows * length).unsqueeze(1)).flatten()
    return Starts(F.pad(flat, (0, 1), value=len(places) * length), length)


def numbered(starts: Starts, rows: int, length: int) -> Tensor:
    """The number of each token's document [rows, length] int64; waits for no device."""
    tokens = torch.arange(rows * length, dtype=torch.int32, device=starts.places.device)
    return torch.searchsorted(starts.places, tokens, right=True).view(rows, length)
