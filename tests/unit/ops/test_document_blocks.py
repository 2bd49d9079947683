"""The documents of a block of a row's queries, and the keys that the block needs."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalite.ops.documents import CuSeqlens, Span, documents_of_block, first_key, packed_cu_seqlens

LENGTHS = [5, 1, 9, 3, 6]
LENGTH = sum(LENGTHS)
STARTS = torch.tensor(LENGTHS).cumsum(0).roll(1)
STARTS[0] = 0


def seen_keys(queries: Tensor, keys: Tensor, block: range, first: int) -> set[tuple[int, int]]:
    """Return (query, key) of a causal kernel over sequences aligned at their ends, by the places in the row."""
    pairs = set()
    for (start, stop), (begin, end) in zip(pairwise(queries), pairwise(keys), strict=True):
        for query in range(int(start), int(stop)):
            last = int(end) - (int(stop) - query) + 1
            pairs |= {(block.start + query, first + key) for key in range(int(begin), last)}
    return pairs


@pytest.mark.parametrize("block", [range(start, start + 4) for start in range(0, LENGTH, 4)], ids=str)
def test_keys_before_a_block_s_first_document_are_left_out(block: range) -> None:
    documents = packed_cu_seqlens(STARTS.int()[None], LENGTH)
    first = first_key(documents, 1, LENGTH, block.start)
    assert first == max(start for start in STARTS.tolist() if start <= block.start)
    assert first == first_key(tuple(Span(length) for length in LENGTHS), 1, LENGTH, block.start)
    cut = documents_of_block(documents, LENGTH, block, first=first)
    assert isinstance(cut, CuSeqlens) and cut.keys is not None
    assert int(cut.keys.cu_seqlens[-1]) == block.stop - first
    expected = {
        (query, key)
        for query in block
        for key in range(max(s for s in STARTS.tolist() if s <= query), query + 1)
    }
    assert seen_keys(cut.cu_seqlens, cut.keys.cu_seqlens, block, first) == expected
    spans = documents_of_block(tuple(Span(length) for length in LENGTHS), LENGTH, block, first=first)
    assert isinstance(spans, tuple) and sum(span.length for span in spans) == len(block)


def test_of_several_rows_the_keys_before_all_their_documents_are_left_out() -> None:
    two = torch.stack((STARTS, torch.tensor([0, 3, LENGTH, LENGTH, LENGTH]))).int()
    documents, block = packed_cu_seqlens(two, LENGTH), range(16, 20)
    assert [first_key(documents, 2, LENGTH, start) for start in (2, 4, 16)] == [0, 0, 3]
    cut = documents_of_block(documents, LENGTH, block, first=3)
    assert isinstance(cut, CuSeqlens) and cut.keys is not None
    # Documents that end before the block have keys and no queries; the first row's first one has lost three keys.
    assert cut.cu_seqlens.tolist() == [0, 0, 0, 0, 2, 4, 4, 8, 8, 8, 8]
    assert cut.keys.cu_seqlens.tolist() == [0, 2, 3, 12, 15, 17, 17, 34, 34, 34, 34]


def test_the_host_does_not_wait_to_leave_keys_out() -> None:
    """On a device a look at the documents would be a sync: all keys stay."""
    on_device = CuSeqlens(torch.empty(6, dtype=torch.int32, device="meta"), 9)
    assert first_key(on_device, 1, 24, 8) == 0
