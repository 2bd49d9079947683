"""The block tables of batches: the work of each block, counted key by key, and equal tables on all ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megalite.data.batches.context_blocks import block_work, windows_of, with_blocks
from megalite.topology.context import blocks_a_rank
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


def test_a_batch_gets_a_table_for_each_row() -> None:
    lengths = ([900, 100, 24], [1024], [8] * 128)
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    batch = replace(tiny_batch(SHAPE, len(ids), sequence_length=1024), document_ids=ids)
    batch = with_blocks(batch, 4, windows_of(SHAPE))
    assert batch.blocks is not None
    blocks = 4 * blocks_a_rank(1024, 4)
    assert batch.blocks.shape == (3, blocks) and batch.blocks.dtype == torch.int64
    assert (batch.blocks.sort(dim=1).values == torch.arange(blocks)).all()
    for row, own in zip(ids, batch.blocks.view(3, 4, -1), strict=True):
        assert (own.diff(dim=1) > 0).all()
        work = torch.from_numpy(block_work(row.numpy(), blocks, {None: 1}))[own].sum(1)
        assert work.max() < 1.05 * work.mean()


def test_rows_without_documents_or_context_ranks_have_no_table() -> None:
    batch = tiny_batch(SHAPE, 2)
    assert with_blocks(batch, 4, {None: 1}).blocks is None
    documents = replace(batch, document_ids=torch.zeros_like(batch.input_ids))
    assert with_blocks(documents, 1, {None: 1}).blocks is None
    assert with_blocks(documents, 2, {None: 1}).blocks is not None


def test_layers_with_a_window_are_counted_apart() -> None:
    assert windows_of(FAMILY_SHAPES["gemma3"]) == {4: 3, None: 1}
