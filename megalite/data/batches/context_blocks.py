"""How the rows of a batch with documents are cut over the context-parallel ranks: by the work of attention in them.

Zig-zag is fair to one document a row only. With documents of a few percent of a row, the busiest of 8 ranks makes 1.6
to 3 times the scores of the mean, and the others wait for it in every layer. Here each rank has equally many blocks,
so that shapes, memory and all work on single tokens stay equal too, and the blocks are chosen so that their scores
sum to nearly the same. Each block is a call of attention, so there are as few as are fair, and where zig-zag is (one
document fills a row, or almost) it stays.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.parallel.step_batch import StepBatch
from megalite.topology.context import FAIR, block_counts, cut_by_work, zig_zag
from megalite.topology.shape import ModelShape

Cut = tuple[tuple[int, ...], ...]
Windows = Mapping[int | None, int]
"""Keys that a token sees (None: all before it) -> the number of layers."""


def windows_of(shape: ModelShape) -> Windows:
    return Counter(map(shape.window_of, range(shape.num_hidden_layers)))


def with_blocks(batch: StepBatch, ranks: int, windows: Windows) -> StepBatch:
    """Return the batch with a block table, if its rows have documents to which zig-zag is unfair; a function of the
    documents alone.

    document_ids must be on the host. ranks: of context parallelism. The table is int64 [M * b, blocks].
    """
    if batch.document_ids is None or ranks == 1:
        return batch
    cuts = cut_rows(batch.document_ids.numpy(), ranks, windows)
    return batch if cuts is None else replace(batch, blocks=torch.tensor(cuts).flatten(1))


def cut_rows(document_ids: NDArray[np.int64], ranks: int, windows: Windows) -> list[Cut] | None:
    """Return the blocks of each rank in each row, ids [rows, S]; None: zig-zag is within `FAIR`.

    All rows have equally many blocks, the fewest that are within `FAIR`, or the most.
    """
    halves = [block_work(row, 2 * ranks, windows) for row in document_ids]
    if _busiest(halves, [zig_zag(ranks)] * len(halves)) <= FAIR:
        return None
    cuts: list[Cut] = []
    for count in block_counts(document_ids.shape[1], ranks):
        works = [block_work(row, ranks * count, windows) for row in document_ids]
        cuts = [cut_by_work(work.tolist(), ranks) for work in works]
        if _busiest(works, cuts) <= FAIR:
            break
    return cuts


def _busiest(works: Sequence[NDArray[np.float64]], cuts: Sequence[Cut]) -> float:
    """Return the work of the busiest rank of each row, all rows together, over the mean of the ranks."""
    rows = zip(works, cuts, strict=True)
    busiest = sum(len(cut) * max(work[list(own)].sum() for own in cut) for work, cut in rows)
    return float(busiest / sum(work.sum() for work in works))


def block_work(document_ids: NDArray[np.int64], blocks: int, windows: Windows) -> NDArray[np.float64]:
    """Return the scores that the queries of each block make in all layers: ids [S], ascending -> [blocks]."""
    length = len(document_ids)
    starts = np.flatnonzero(np.diff(document_ids, prepend=document_ids[0] - 1))
    bounds = np.linspace(0, length, blocks + 1, dtype=np.int64)
    document = np.searchsorted(starts, bounds, side="right") - 1
    before = np.cumsum(_scores(np.diff(starts, append=length), windows))
    earlier = np.where(document > 0, before[document - 1], 0.0)
    return np.diff(earlier + _scores(bounds - starts[document], windows))


def _scores(lengths: NDArray[np.int64], windows: Windows) -> NDArray[np.float64]:
    """Return the scores of documents of these lengths in all layers."""
    total = np.zeros(len(lengths))
    for window, layers in windows.items():
        short = lengths if window is None else np.minimum(lengths, window)
        total += layers * (short * (short + 1) / 2 + (lengths - short) * (window or 0))
    return total
