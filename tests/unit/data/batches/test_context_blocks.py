"""The block tables of batches: the work of each block, counted key by key, and equal tables on all ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megalite.data.batches.context_blocks import block_work, windows_of, with_blocks
from megalite.parallel.step_batch import StepBatch
from megalite.topology.context import FAIR
from tests.support.tiny import FAMILY_SHAPES, tiny_batch, tiny_shape

SHAPE = tiny_shape()


def counted(ids: np.ndarray, blocks: int, windows: dict[int | None, int]) -> np.ndarray:
    """Return the keys that the queries of each block see, from the mask of every pair of positions."""
    places = np.arange(len(ids))
    back = places[:, None] - places
    seen = (back >= 0) & (ids[:, None] == ids)
    total = sum(n * (seen & (back < (window or len(ids)))).sum(1) for window, n in windows.items())
    return np.asarray(total).reshape(blocks, -1).sum(1)


@pytest.mark.parametrize("windows", [{None: 1}, {5: 3}, {None: 2, 7: 4}, {200: 1}])
def test_the_work_of_a_block_is_its_number_of_scores(windows: dict[int | None, int]) -> None:
    for lengths in ([96], [1] * 96, [3, 40, 1, 52], [50, 46], [12] * 8):
        ids = np.repeat(np.arange(len(lengths)), lengths)
        for blocks in (1, 4, 8, 96):
            assert block_work(ids, blocks, windows).tolist() == counted(ids, blocks, windows).tolist()


def in_documents(*lengths: list[int]) -> StepBatch:
    """Return rows of 1024 tokens with documents of these lengths."""
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    return replace(tiny_batch(SHAPE, len(ids), sequence_length=1024), document_ids=ids)


def busiest(batch: StepBatch, ranks: int) -> float:
    """Return the scores of the busiest rank of each row, all rows together, over the mean of the ranks."""
    assert batch.document_ids is not None and batch.blocks is not None
    rows, blocks = batch.blocks.shape
    most = total = 0.0
    for row, own in zip(batch.document_ids.numpy(), batch.blocks.view(rows, ranks, -1), strict=True):
        work = counted(row, blocks, {None: 1})[own.numpy()].sum(1)
        most, total = most + work.max(), total + work.mean()
    return most / total


def test_a_batch_gets_a_table_for_each_row() -> None:
    rows = [900, 100, 24], [600, 424], [8] * 128
    batch = with_blocks(in_documents(*rows), 4, windows_of(SHAPE))
    assert batch.blocks is not None
    blocks = batch.blocks.shape[1]
    assert batch.blocks.shape == (3, blocks) and batch.blocks.dtype == torch.int64
    assert (batch.blocks.sort(dim=1).values == torch.arange(blocks)).all()
    assert (batch.blocks.view(3, 4, -1).diff(dim=2) > 0).all()
    assert busiest(batch, 4) <= FAIR


def test_a_row_has_no_more_blocks_than_make_it_fair() -> None:
    """One long document beside short ones: the fewer blocks, the more of it has the rank that begins with its end."""
    found = {}
    for length in (1024, 1000, 700, 200):
        rest = 1024 - length
        batch = with_blocks(in_documents([length] + [1] * rest), 2, {None: 1})
        found[length] = 2 if batch.blocks is None else batch.blocks.shape[1] // 2
        assert batch.blocks is None or busiest(batch, 2) <= FAIR
    assert found == {1024: 2, 1000: 2, 700: 4, 200: 8}


def test_rows_without_documents_or_context_ranks_have_no_table() -> None:
    batch = tiny_batch(SHAPE, 2)
    assert with_blocks(batch, 4, {None: 1}).blocks is None
    documents = in_documents([700, 324])
    assert with_blocks(documents, 1, {None: 1}).blocks is None
    assert with_blocks(documents, 2, {None: 1}).blocks is not None


def test_layers_with_a_window_are_counted_apart() -> None:
    assert windows_of(FAMILY_SHAPES["gemma3"]) == {4: 3, None: 1}
