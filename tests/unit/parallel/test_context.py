"""The cut of rows over context-parallel ranks, and the documents of each block of queries."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.ops.attention import causal_attention, document_cu_seqlens, document_spans, documents_seen
from megalite.ops.attention_form import AttentionForm
from megalite.ops.choice import ALL_COMPILED
from megalite.ops.documents import documents_of_block, documents_of_row
from megalite.ops.dropout import CountedMask
from megalite.parallel.context import ContextRows, cut
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.axes import Layout
from tests.support.parity import OPERATOR_RTOL, assert_close
from tests.support.tiny import tiny_batch, tiny_shape

ROWS, LENGTH = 3, 24
# Blocks of two rows that are not cut zig-zag, four on each of two ranks.
OTHER = torch.tensor([[0, 1, 6, 7, 2, 3, 4, 5], [1, 3, 4, 5, 0, 2, 6, 7], [0, 3, 4, 7, 1, 2, 5, 6]])


def _mesh(rank: int, size: int) -> ParallelMesh:
    ranks = RankGroup(tuple(range(size)), rank, role="cp")
    return ParallelMesh(Layout(context=size), rank, torch.device("cpu"), {"cp": ranks})


def _rows(rank: int, size: int, table: Tensor | None) -> ContextRows:
    return ContextRows.of(ROWS, LENGTH, _mesh(rank, size), table)


CUTS = [(2, None), (4, None), (2, OTHER)]


@pytest.mark.parametrize(("size", "table"), CUTS, ids=["2 ranks", "4 ranks", "each row its own"])
def test_each_position_is_on_one_rank_and_order_finds_it(size, table):
    stack = torch.stack([_rows(rank, size, table).positions for rank in range(size)])
    assert stack.shape == (size, ROWS, LENGTH // size)
    assert (stack.diff(dim=2) > 0).all(), "a rank's blocks ascend"
    rows = _rows(0, size, table)
    in_order = stack.view(-1, rows.block_length)[rows.order].view(ROWS, LENGTH)
    assert torch.equal(in_order, torch.arange(LENGTH).expand(ROWS, -1))
    assert torch.equal(rows.order[rows.inverse], torch.arange(len(rows.order)))


def test_zig_zag_pairs_the_first_blocks_with_the_last():
    assert _rows(1, 4, None).positions[0].tolist() == [3, 4, 5, 18, 19, 20]
    assert _rows(1, 4, None).blocks == ((1, 6),)


@pytest.mark.parametrize(("size", "table"), CUTS, ids=["2 ranks", "4 ranks", "each row its own"])
def test_a_cut_batch_has_the_columns_of_its_positions_and_whole_documents(size, table):
    batch = tiny_batch(tiny_shape(), ROWS, sequence_length=LENGTH)
    whole = replace(batch, blocks=table, document_ids=batch.position_ids // 5)
    for rank in range(size):
        own, at = cut(whole, _mesh(rank, size)), _rows(rank, size, table).positions
        assert torch.equal(own.position_ids, at)
        for row in range(ROWS):
            assert torch.equal(own.labels[row], whole.labels[row, at[row]])
        assert own.document_ids is whole.document_ids and own.sample_indices is whole.sample_indices
    assert cut(whole, ParallelMesh.single()) is whole


def _documents() -> Tensor:
    """Rows with documents of one token, of a block and of the whole row."""
    starts = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    starts[0, [1, 6, 7, 13, 18]] = 1
    starts[2, [2, 3, 4, 9, 22]] = 1
    return starts.cumsum(dim=1)


FORMS = {
    "dense": documents_seen,
    "spans": document_spans,
    "cu_seqlens": document_cu_seqlens,
}


@pytest.mark.parametrize("softcap", [None, 0.8], ids=["", "soft cap"])
@pytest.mark.parametrize("window", [None, 4], ids=["", "window"])
@pytest.mark.parametrize("documents", [None, *FORMS])
def test_blocks_of_queries_attend_as_the_whole_row_does(documents, window, softcap):
    dropout = CountedMask((3, 5), torch.arange(7, 7 + ROWS), range(2, 6), 1 << 14)
    for mask in (None, dropout) if documents != "spans" else (None,):
        form = AttentionForm(window, None, mask, None, softcap)
        _blocks_equal_rows(form, documents, causal_attention)
        if softcap is None and documents in (None, "cu_seqlens"):
            _blocks_equal_rows(form, documents, ALL_COMPILED.attend)


def _blocks_equal_rows(form: AttentionForm, documents: str | None, attend: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(ROWS, LENGTH, heads, 6, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    ]
    query, key, value = tensors
    if documents is not None:
        form = form._replace(documents=FORMS[documents](_documents()))
    expected = causal_attention(query, key, value, form)
    for row in (None, 0, 2):
        of_row, mine = form, slice(None)
        if row is not None:
            mine = slice(row, row + 1)
            if form.documents is not None:
                of_row = form._replace(documents=documents_of_row(form.documents, LENGTH, row))
            if isinstance(form.mask, CountedMask):
                samples = form.mask.sample_indices[mine]
                of_row = of_row._replace(mask=form.mask._replace(sample_indices=samples))
        for block in (range(0, 6), range(6, 12), range(18, 24), range(7, 8)):
            of_block = of_row
            if of_row.documents is not None:
                of_block = of_row._replace(documents=documents_of_block(of_row.documents, LENGTH, block))
            inputs = query[mine, block.start : block.stop], key[mine, : block.stop], value[mine, : block.stop]
            attended = attend(*inputs, of_block)
            assert_close(attended, expected[mine, block.start : block.stop], rtol=OPERATOR_RTOL)
