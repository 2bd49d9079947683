"""The cut of a row by the work of its documents, and the method that "auto" stands for."""

from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest

from megalite.topology.axes import Layout
from megalite.topology.context import (
    ContextSizes,
    block_counts,
    choose_method,
    context_kept,
    context_traffic,
    cut_by_work,
    layer_values,
    zig_zag,
)
from megalite.topology.shape import ModelShape
from tests.support.parity import about

LLAMA = ModelShape(128256, 4096, 14336, 32, 32, 8, 128)


def block_works(lengths: list[int], blocks: int) -> list[int]:
    """Return the causal scores of each of equal blocks of a row, of documents of these lengths."""
    works = [place + 1 for length in lengths for place in range(length)]
    sums = [0, *accumulate(works)]
    size = len(works) // blocks
    return [sums[(block + 1) * size] - sums[block * size] for block in range(blocks)]


def imbalance(works: list[int], cut: tuple[tuple[int, ...], ...]) -> float:
    """Return the work of the busiest rank over the mean."""
    return max(sum(works[block] for block in own) for own in cut) * len(cut) / sum(works)


def documents(length: int, mean: int, seed: int) -> list[int]:
    """Return lengths of a long-tailed distribution that fill a row."""
    draw, lengths = Random(seed), list[int]()
    while sum(lengths) < length:
        lengths.append(min(1 + int(draw.lognormvariate(0, 1.5) * mean / 3), length - sum(lengths)))
    return lengths


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [100, 1000, 8192])
def test_work_is_balanced_where_zig_zag_is_not(ranks: int, mean: int) -> None:
    """The busiest rank has at most 5 % more than the mean in every row, and over 20 % more by zig-zag."""
    blocks = ranks * block_counts(8192, ranks)[-1]
    by_work, zig_zagged = [], []
    for seed in range(8):
        lengths = documents(8192, mean, seed)
        works = block_works(lengths, blocks)
        cut = cut_by_work(works, ranks)
        assert sorted(block for own in cut for block in own) == list(range(blocks))
        assert all(list(own) == sorted(own) and len(own) == blocks // ranks for own in cut)
        by_work.append(imbalance(works, cut))
        zig_zagged.append(imbalance(block_works(lengths, 2 * ranks), zig_zag(ranks)))
    assert max(by_work) < 1.05
    assert max(zig_zagged) > 1.2


def test_one_long_document_is_as_balanced_as_zig_zag() -> None:
    works = block_works([4096], 64)
    assert imbalance(works, cut_by_work(works, 4)) < 1.01
    assert imbalance(block_works([4096], 8), zig_zag(4)) == 1


def test_equal_work_is_dealt_in_turn() -> None:
    assert cut_by_work([1, 1, 1, 1], 2) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("length", "ranks", "counts"),
    [(8192, 8, (4, 8)), (1024, 8, (4,)), (24, 2, (2,)), (6 * 256, 3, (4, 8)), (2 * 3 * 64, 2, (4,))],
)
def test_blocks_divide_the_row_and_fill_tiles(length: int, ranks: int, counts: tuple[int, ...]) -> None:
    assert block_counts(length, ranks) == counts
    assert all(length % (ranks * count) == 0 for count in counts)


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (Layout(context=2), "gather"),  # few key-value heads: their values are fewer than those of all heads
        (Layout(context=8), "ulysses"),
        (Layout(context=8, tensor=8), "gather"),  # 4 heads do not divide by 8
        (Layout(context=64), "ring"),  # gathered keys and values would take more than the layer
    ],
)
def test_auto_goes_by_heads_traffic_and_memory(layout: Layout, method: str) -> None:
    choice = choose_method(LLAMA, layout, ring=True, recomputed=False)
    assert choice.method == method
    sizes = ContextSizes.of(LLAMA, layout, 1)
    by_gather, by_ulysses = (context_traffic(sizes, name) for name in ("gather", "ulysses"))
    assert f"{by_gather:,.0f}" in choice.reason or method == "ring"
    if method == "ulysses":
        assert by_ulysses <= by_gather
    elif method == "ring":
        assert context_kept(sizes, "gather") > layer_values(LLAMA, layout)


def test_the_ring_is_no_choice_where_gather_keeps_nothing_or_the_rows_forbid_it() -> None:
    layout = Layout(context=64)
    assert choose_method(LLAMA, layout, ring=False, recomputed=False).method == "gather"
    assert choose_method(LLAMA, layout, ring=True, recomputed=True).method == "gather"


def test_key_value_heads_that_ranks_can_neither_divide_nor_share_are_sent_for_each_query_head() -> None:
    """36 heads with 9 key-value heads over 6 ranks: Ulysses sends 36 of each, which is more than gather sends."""
    shape = replace(LLAMA, num_attention_heads=36, num_key_value_heads=9)
    sizes = ContextSizes.of(shape, Layout(context=6), 1)
    assert sizes.spread == 4 * sizes.key_value == 2 * 36 * shape.head_dim
    assert choose_method(shape, Layout(context=6), ring=False, recomputed=False).method == "gather"


def test_all_heads_of_their_own_make_ulysses_as_cheap_as_gather_at_two_ranks() -> None:
    shape = replace(LLAMA, num_key_value_heads=32)
    choice = choose_method(shape, Layout(context=2), ring=True, recomputed=False)
    assert choice.method == "ulysses"
    assert choice.numbers["values sent by ulysses"] == about(choice.numbers["values sent by gather"])
