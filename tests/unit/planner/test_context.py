"""Context parallelism's formulas against sends, gathers and exchanges that are carried out on lists."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from megalite.config.sections.training_section import ComputeSettings
from megalite.planner.cluster import Cluster
from megalite.planner.experts import block_activations, context_bytes, context_seconds
from megalite.planner.memory import stage_memory
from megalite.planner.planned_run import PlannedRun
from megalite.planner.step_time import step_time
from megalite.topology.axes import Layout
from megalite.topology.context import (
    CONTEXT_METHODS,
    ContextSizes,
    context_kept,
    context_traffic,
    context_working,
)
from tests.support.parity import about
from tests.unit.planner.plans import SHAPE, plan

BATCH, LENGTH, HEADS, DIM = 2, 32, 8, 8
GROUPED = replace(SHAPE, num_key_value_heads=2)


def cut(
    ranks: int, method: str = "gather", *, tensor: int = 1, heads: int = 8, **changes: object
) -> PlannedRun:
    run = plan(replace(SHAPE, num_key_value_heads=heads), layout=Layout(tensor=tensor, context=ranks))
    return replace(run, context_method=method, **changes)  # type: ignore[arg-type]


def of(run: PlannedRun) -> ContextSizes:
    return ContextSizes.of(run.shape, run.layout, run.tokens)


def ring_sends(ranks: int, block: int, *, recomputed: bool) -> Counter[int]:
    """Return rank -> values sent: keys and values until all ranks have seen them, then home with their gradients."""
    sent: Counter[int] = Counter()

    def rotate(travelling: list[int]) -> list[int]:
        for rank in range(ranks):
            sent[rank] += block
        return [travelling[-1], *travelling[:-1]]

    def see_all() -> None:
        owners = list(range(ranks))
        seen = [{owner} for owner in owners]
        while any(len(each) < ranks for each in seen):
            owners = rotate(owners)
            for rank, owner in enumerate(owners):
                seen[rank].add(owner)

    for _ in range(2 if recomputed else 1):
        see_all()
    see_all()  # the backward's
    # A gradient starts at its owner, gets each rank's part one step behind the keys, and ends at home.
    gradients = rotate(list(range(ranks)))
    while gradients != list(range(ranks)):
        gradients = rotate(gradients)
    return sent


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_sends_what_its_rotations_send(ranks: int, recomputed: bool) -> None:
    for heads in (2, 8):
        block = BATCH * (LENGTH // ranks) * heads * DIM * 2
        sent = ring_sends(ranks, block, recomputed=recomputed)
        found = context_traffic(of(cut(ranks, "ring", heads=heads)), "ring", recomputed=recomputed)
        assert set(sent.values()) == {found}


def test_a_ring_sends_what_was_measured() -> None:
    """Elements of the prototype that the formulas were taken from: hidden 48, 8 heads of 6, 4 of keys, 16 tokens."""
    shape = replace(SHAPE, hidden_size=48, num_key_value_heads=4, head_dim=6)
    for ranks, measured in ((2, 1536), (4, 1920)):
        run = plan(shape, micro_batch_size=1, sequence_length=16, layout=Layout(context=ranks))
        assert context_traffic(of(run), "ring") == measured


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_sends_its_part_to_each_other_rank_and_gets_gradients_back(ranks: int) -> None:
    keys = {rank: [rank] * (BATCH * (LENGTH // ranks) * 2 * DIM * 2) for rank in range(ranks)}
    forward = sum(len(keys[0]) for receiver in keys if receiver != 0)
    backward = sum(len(keys[owner]) for owner in keys if owner != 0)  # gradients of others' keys
    sizes = of(cut(ranks, heads=2))
    assert context_traffic(sizes, "gather") == forward + backward
    assert context_traffic(sizes, "gather", recomputed=True) == 2 * forward + backward
    # All keys and values stay for the backward; with recomputed attention they come again.
    assert context_kept(sizes, "gather") == sum(map(len, keys.values()))
    assert context_kept(sizes, "gather", recomputed=True) == 0


@pytest.mark.parametrize(("ranks", "heads"), [(2, 8), (4, 8), (4, 2)])
def test_ulysses_exchanges_tokens_for_heads(ranks: int, heads: int) -> None:
    """Each value is (token, head): it stays where its token's rank is its head's rank."""
    spread = max(heads, ranks)

    def sent(number: int) -> int:
        tokens = [(token, token * ranks // LENGTH) for token in range(LENGTH)]
        to = [(head, head * ranks // number) for head in range(number)]
        return BATCH * DIM * sum(owner == 0 and rank != 0 for _, owner in tokens for _, rank in to)

    forward = 2 * sent(HEADS) + 2 * sent(spread)
    sizes = of(cut(ranks, "ulysses", heads=heads))
    assert context_traffic(sizes, "ulysses") == 2 * forward
    assert context_traffic(sizes, "ulysses", recomputed=True) == 3 * forward
    repeated = (spread - heads) * 2 * DIM * BATCH * LENGTH // ranks
    assert context_kept(sizes, "ulysses") == repeated


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_works_on_as_many_scores(ranks: int) -> None:
    """The r-th and the r-th last of 2c runs: with half of each diagonal score, as the formula counts."""
    run, work = LENGTH // (2 * ranks), []
    for rank in range(ranks):
        queries = [
            *range(rank * run, (rank + 1) * run),
            *range(LENGTH - (rank + 1) * run, LENGTH - rank * run),
        ]
        work.append(BATCH * HEADS * sum(query + 0.5 for query in queries))
    # The causal half of all scores, shared by the ranks: why the planner divides operations by c.
    assert set(work) == {BATCH * HEADS * LENGTH * LENGTH / 2 / ranks}


def test_tensor_parallel_ranks_have_their_own_heads() -> None:
    for method in CONTEXT_METHODS:
        alone, half = (context_traffic(of(cut(2, method, tensor=size)), method) for size in (1, 2))
        assert half == alone / 2
        assert context_traffic(of(cut(1, method)), method) == context_working(of(cut(1, method)), method) == 0


def test_memory_of_a_layer_is_that_of_its_tokens_and_what_the_method_keeps() -> None:
    short = plan(sequence_length=LENGTH // 2)
    for method, mode in product(CONTEXT_METHODS, ("none", "selective", "full")):
        run = cut(2, method)
        layer, plain = (block_activations(each, mode, 0) for each in (run, short))
        values = 2 * BATCH * LENGTH * HEADS * DIM * 2  # bytes of all keys and values
        of_gather = values * (method == "gather")
        # A rank saves its attention's output once more, in the order of its tokens.
        output = values / 4 * (method != "ring")
        assert layer.kept - plain.kept == (of_gather + output) * (mode == "none")
        meanwhile = values if method == "ring" else of_gather * (mode != "none")
        assert layer.backward - plain.backward == layer.forward - plain.forward == meanwhile
        assert stage_memory(run, 0).weights == stage_memory(short, 0).weights and run.copies == 2


def test_zero_partitions_over_the_ranks_of_a_sequence_too() -> None:
    plain, shared = stage_memory(plan(zero_stage=1), 0), stage_memory(cut(4, zero_stage=1), 0)
    assert shared.moments == plain.moments / 4


NODE = Cluster("H100 80GB HBM3", nodes=1, cards_per_node=8, efficiency=0.5, link_efficiency=1.0)
KEYS = BATCH * LENGTH // 4 * 2 * HEADS * DIM  # values of a rank's keys and values, with four of them


def test_the_step_waits_for_every_layer_s_keys() -> None:
    run = cut(4)
    time = step_time(run, NODE, stage_memory(run, 0))
    assert time.context == about(4 * 8 * 6 * 2 * KEYS / 450e9)
    assert time.context == about(4 * 8 * context_seconds(run, NODE))
    assert time.compute == about(step_time(plan(), NODE, stage_memory(plan(), 0)).compute / 4)


def test_a_ring_sends_beside_attention() -> None:
    run = cut(4, "ring")
    last = 4 * KEYS / 450e9  # the sums of gradients go home in fp32
    every = (6 * 2 * KEYS + 4 * 4 * KEYS) / 450e9
    assert context_seconds(run, NODE) == about(every)
    assert context_seconds(run, NODE, attention=every / 2) == about(every - 3 / 4 * every / 2)
    assert context_seconds(run, NODE, attention=1.0) == about(last)
    for method in ("gather", "ulysses"):
        assert context_seconds(cut(4, method), NODE, attention=1.0) == context_seconds(cut(4, method), NODE)
    # 6 products of 2 operations in the causal half of all scores; backward computes selective recompute's two again.
    attention = 6 * BATCH * HEADS * DIM * LENGTH**2 / 4 / (NODE.peak("bf16") or 0) / 0.5
    for mode, share in (("none", 1), ("selective", 4 / 3)):
        run = cut(4, "ring", training=ComputeSettings(recompute=mode))
        time = step_time(run, NODE, stage_memory(run, 0))
        assert time.context == about(4 * 8 * context_seconds(run, NODE, share * attention))


def test_between_nodes_a_ring_and_an_exchange_have_one_network_card() -> None:
    """A gather's rings leave each node by all of its cards, a message from rank to rank by one."""
    nodes = replace(NODE, nodes=2, cards_per_node=2, network=10)
    traffic = {method: context_bytes(cut(4, method)) for method in CONTEXT_METHODS}
    seconds = {method: context_seconds(cut(4, method), nodes) for method in CONTEXT_METHODS}
    assert seconds["gather"] == about(traffic["gather"] / 20e9)
    assert seconds["ring"] == about(traffic["ring"] / 10e9)
    assert seconds["ulysses"] == about(2 / 3 * traffic["ulysses"] / 10e9)
