"""Attention within documents: by spans and by one mask, it is each document's own causal attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.ops.attention import causal_attention, document_spans, documents_seen
from megalite.ops.attention_form import AttentionForm
from megalite.ops.dropout import Mask
from tests.support.parity import LAYOUT_RTOL, assert_close

LENGTH, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 150, 4, 2, 8
# Longer and shorter than what documents share a span in; a row of one document; one of one-token documents.
ROWS = (
    (100, 3, 1, 20, 1, 25),
    (150,),
    (1,) * 150,
    (30, 34, 1, 85),
)


def _ids(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])


def _heads(rows: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(rows, length, heads, HEAD_DIM, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]


def _alone(heads: list[Tensor], rows: tuple[tuple[int, ...], ...], window: int | None) -> Tensor:
    """Every document by a call of its own."""
    attended = []
    for row, lengths in enumerate(rows):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        pieces = [
            causal_attention(
                *(each[row : row + 1, end - length : end] for each in heads), AttentionForm(window)
            )
            for end, length in zip(ends, lengths, strict=True)
        ]
        attended.append(torch.cat(pieces, dim=1))
    return torch.cat(attended)


@pytest.mark.parametrize("window", [None, 7, 90])
@pytest.mark.parametrize("form", [document_spans, documents_seen])
def test_documents_in_a_row_are_what_each_is_alone(form, window) -> None:
    heads = _heads(len(ROWS), LENGTH)
    together = causal_attention(*heads, AttentionForm(window, form(_ids(ROWS))))
    alone = _alone(heads, ROWS, window)
    assert_close(together, alone, what="attended")
    weights = torch.randn(alone.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for ours, theirs in zip(
        torch.autograd.grad((together * weights).sum(), heads),
        torch.autograd.grad((alone * weights).sum(), heads),
        strict=True,
    ):
        assert_close(ours, theirs, what="gradient")


def test_dropped_probabilities_are_of_the_own_document() -> None:
    """With nothing dropped the reference attention is the fused one."""
    heads = _heads(len(ROWS), LENGTH)
    keep = torch.ones(len(ROWS), HEADS, LENGTH, LENGTH, dtype=torch.uint8)
    for window in (None, 7):
        dropped = causal_attention(*heads, AttentionForm(window, documents_seen(_ids(ROWS)), Mask(keep, 1.0)))
        assert_close(dropped, _alone(heads, ROWS, window), rtol=LAYOUT_RTOL)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 3))
def test_spans_cover_the_rows_in_order_and_keep_documents_whole(lengths: list[int], rows: int) -> None:
    ids = _ids((tuple(lengths),) * rows)
    spans = document_spans(ids)
    assert sum(span.length for span in spans) == ids.numel()
    place, flat = 0, ids.flatten()
    for length, seen, _ in spans:
        own = flat[place : place + length]
        assert place // sum(lengths) == (place + length - 1) // sum(lengths), "a span lies in two rows"
        expected = (own[:, None] == own[None]).tril()
        if seen is None:
            assert expected.equal(torch.ones_like(expected).tril())
        else:
            assert len(own.unique()) > 1 and seen.equal(expected)
        place += length
        assert place == ids.numel() or place % sum(lengths) == 0 or flat[place] != flat[place - 1]
