"""The layouts that a search calls legal load as runs, and those that it refuses do not."""

import random
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import ConfigError
from megalite.planner.cluster import FACTS, Cluster, card_named
from megalite.planner.memory import CARD_BASE_BYTES, largest_rank, stage_memory
from megalite.planner.search import LayoutChoice, LayoutSearch, needs_too_much, search
from megalite.planner.step_time import step_time
from megalite.topology.axes import Layout
from megalite.topology.flops import attention_flops, flops_per_token, forward_flops
from tests.support.parity import about
from tests.unit.config.runs import load
from tests.unit.planner.plans import BATCH, CLUSTER, H100, SHAPE, plan

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> LayoutSearch:
    return search(load(tmp_path_factory.mktemp("run"), BATCH).config, 300, CLUSTER)


def resolved(folder: Path, choice: LayoutChoice) -> Any:
    settings: dict[str, Any] = {**BATCH, **choice.flags}
    zero = settings.pop("deepspeed.zero_optimization.stage", 0)
    if zero:
        settings["deepspeed"] = {"zero_optimization": {"stage": zero}}
    return load(folder, settings, world_size=CLUSTER.cards).config


def test_legal_layouts_load(tmp_path: Path, layouts: LayoutSearch) -> None:
    assert len(layouts.fitting) > 100
    for layout in random.Random(0).sample(list(layouts.fitting), 12):
        config = resolved(tmp_path, layout.choice)
        assert config.layout == layout.run.layout and config.split == layout.run.split
        assert config.batch.micro_batches == layout.run.micro_batches


def test_refused_layouts_do_not_load(tmp_path: Path, layouts: LayoutSearch) -> None:
    assert len(layouts.refused) > 100
    for layout in random.Random(0).sample(list(layouts.refused), 12):
        with pytest.raises(ConfigError) as refusal:
            resolved(tmp_path, layout.choice)
        assert layout.problem.key in {problem.key for problem in refusal.value.problems}


LONG = {**BATCH, "training.sequence_length": 16384, "model.max_position_embeddings": 16384}


@pytest.fixture(scope="module")
def long_layouts(tmp_path_factory: pytest.TempPathFactory) -> LayoutSearch:
    """Layouts of sequences that are long enough to be cut over two or four ranks."""
    return search(load(tmp_path_factory.mktemp("run"), LONG).config, 300, CLUSTER)


def test_long_sequences_are_cut_where_each_rank_has_enough_of_them(
    layouts: LayoutSearch, long_layouts: LayoutSearch, tmp_path: Path
) -> None:
    every = [layout.choice for layout in (*layouts.fitting, *layouts.too_large, *layouts.refused)]
    assert {choice.context for choice in every} == {1}
    every = [
        layout.choice for layout in (*long_layouts.fitting, *long_layouts.too_large, *long_layouts.refused)
    ]
    assert {choice.context for choice in every} == {1, 2, 4}
    assert all(choice.layout.world_size == CLUSTER.cards for choice in every)
    cut = [layout for layout in long_layouts.fitting if layout.choice.context > 1]
    for layout in random.Random(0).sample(cut, 6):
        settings = {**LONG, **layout.choice.flags}
        if zero := settings.pop("deepspeed.zero_optimization.stage", 0):
            settings["deepspeed"] = {"zero_optimization": {"stage": zero}}
        config = load(tmp_path, settings, world_size=CLUSTER.cards).config
        assert config.layout == layout.run.layout and config.batch.micro_batches == layout.run.micro_batches


def test_a_wish_for_context_ranks_fixes_them(tmp_path: Path) -> None:
    found = search(load(tmp_path, BATCH).config, 300, CLUSTER, context=2)
    assert {layout.choice.context for layout in found.fitting} == {2}
    odd = search(load(tmp_path, {**BATCH, "training.sequence_length": 20}).config, 300, CLUSTER, context=4)
    assert not odd.fitting and not odd.too_large
    assert any("20 is not divisible by 2 * parallel.context 4" in str(each.problem) for each in odd.refused)


def test_attention_and_links_decide_how_ranks_share_a_sequence(tmp_path: Path) -> None:
    """Slow products leave the ring time to send; on slow links the fewest bytes win; documents rule the ring out."""
    busy, waiting = replace(CLUSTER, efficiency=1e-6), replace(CLUSTER, link_efficiency=1e-6)
    documents = {**LONG, "data.document_mask": True}
    for settings, cluster, expected in (
        (LONG, busy, "ring"),
        (LONG, waiting, "gather"),
        (documents, busy, "gather"),
        ({**LONG, "parallel.context_method": "ulysses"}, busy, "ulysses"),
    ):
        found = search(load(tmp_path, settings).config, 300, cluster, context=2)
        assert {layout.run.context_method for layout in found.fitting} == {expected}
        assert {layout.choice.flags["parallel.context_method"] for layout in found.fitting} == {expected}


def test_layouts_are_ranked_by_time(layouts: LayoutSearch) -> None:
    seconds = [layout.time.total for layout in layouts.fitting]
    assert seconds == sorted(seconds)


def test_a_layout_needs_what_its_largest_rank_needs(layouts: LayoutSearch) -> None:
    for layout in random.Random(0).sample(list(layouts.fitting), 12):
        assert layout.memory.peak == largest_rank(layout.run, base=CARD_BASE_BYTES).peak


def test_the_nearest_layout_differs_least(layouts: LayoutSearch) -> None:
    best = layouts.fitting[0].choice
    nearest = layouts.nearest(replace(best, micro_batch_size=64))
    assert nearest is not None
    assert replace(nearest.choice, micro_batch_size=best.micro_batch_size) == best
    assert LayoutSearch((), (), ()).nearest(best) is None


SEVERAL_PROCESSES = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.unit.config.runs import load
from tests.unit.planner.plans import BATCH, CLUSTER
from megalite.planner import search as planner

config, found = load(Path(sys.argv[1]), BATCH).config, []
for cores in (1, 2):
    planner.available_cores = lambda cores=cores: cores
    found.append(planner.search(config, 300, replace(CLUSTER, cards_per_node=8)))
one, two = found
assert "torch" not in sys.modules
assert len(one.fitting) + len(one.too_large) + len(one.refused) > 4096
for kind in ("fitting", "too_large", "refused"):
    assert [vars(each) for each in getattr(one, kind)] == [vars(each) for each in getattr(two, kind)]
print(len(one.fitting))
"""


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    """In a program without torch, as the command is: with torch in it a fork may crash, and one process searches."""
    program = [sys.executable, "-c", SEVERAL_PROCESSES, str(tmp_path)]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    config = load(tmp_path, BATCH).config
    import_module("torch")
    found = search(config, 300, replace(CLUSTER, cards_per_node=8))
    assert ended.stdout == f"{len(found.fitting)}\n"


@pytest.mark.extended
def test_a_layout_that_needs_more_than_a_card_has_says_both(tmp_path: Path) -> None:
    large = {
        **BATCH,
        "model.hidden_size": 16384,
        "model.intermediate_size": 65536,
        "model.num_hidden_layers": 32,
    }
    cluster = replace(CLUSTER, card="L4")
    found = search(load(tmp_path, large).config, 300, cluster)
    assert not found.fitting and found.too_large
    assert [layout.memory.peak for layout in found.too_large] == sorted(
        layout.memory.peak for layout in found.too_large
    )
    assert needs_too_much(found.too_large[0], cluster).endswith("of which a run may plan with 20.2 GiB")


def test_compute_is_operations_over_peak() -> None:
    run = plan()
    time = step_time(run, CLUSTER, stage_memory(run, 0))
    operations = flops_per_token(SHAPE, 32) * 4 * 64
    assert time.compute == about(operations / (989.4e12 * 0.5))
    assert time.bubble == time.tensor == time.pipeline == time.data == 0


def test_recomputation_repeats_forwards() -> None:
    forward = forward_flops(SHAPE, 32)
    once = flops_per_token(SHAPE, 32)
    for mode, again in (("selective", sum(attention_flops(SHAPE, 32))), ("full", sum(forward.layers))):
        run = plan(recompute=mode)
        compute = step_time(run, CLUSTER, stage_memory(run, 0)).compute
        assert compute == about((once + again) * 4 * 64 / (989.4e12 * 0.5))


def test_bubble_is_the_schedule_s_share() -> None:
    run = plan(layout=Layout(pipeline=4), micro_batches=8)
    time = step_time(run, CLUSTER, stage_memory(run, 0))
    assert time.bubble / (time.bubble + time.compute) == about(3 / (8 + 3))


def test_traffic_is_volume_over_bandwidth() -> None:
    """Tensor 2 inside of a node at 450 GB/s, data 4 across nodes, two cards of a node with 50 GB/s each; four micro
    batches of 64 tokens."""
    run = plan(layout=Layout(tensor=2, data=4), zero_stage=1)
    memory = stage_memory(run, 0)
    time = step_time(run, CLUSTER, memory)
    assert time.compute == about(flops_per_token(SHAPE, 32) * 4 * 64 / 2 / (989.4e12 * 0.5))
    assert time.tensor == about(4 * 8 * 4 * 64 * 64 * 2 / 450e9)
    hidden = 2 / 3 * time.compute / 4
    sums = 2 * memory.gradients * 3 / 4 / 100e9
    assert time.data == about(max(0, sums - hidden) + memory.weights * 3 / 4 / 100e9)


def test_a_ring_leaves_a_node_by_the_network_of_each_of_its_cards() -> None:
    assert CLUSTER.bandwidth(4, 1) == about(450e9)  # one node
    assert [CLUSTER.bandwidth(8 // stride, stride) for stride in (1, 2, 4)] == about([200e9, 100e9, 50e9])
    assert replace(CLUSTER, network=400).bandwidth(8, 1) == about(450e9)  # no faster than inside
    # A stage sends to the next one, card to card.
    assert CLUSTER.bandwidth(4, 2, ring=False) == about(50e9)


def test_zero_3_gathers_weights_twice_and_sums_gradients_in_every_micro_batch() -> None:
    run = plan(layout=Layout(tensor=2, data=4), zero_stage=3)
    memory = stage_memory(run, 0)
    time = step_time(run, CLUSTER, memory)
    hidden, share = 2 / 3 * time.compute / 4, 3 / 4 / 100e9  # both cards of a node in the ring
    sums = max(0, 4 * (4 * memory.gradients * share - hidden))
    assert time.data == about(sums + 2 * 4 * 4 * memory.weights * share)


def test_recomputed_layers_sum_again_and_sequence_parallel_ones_gather_again() -> None:
    for changes, sums in (({}, 4), ({"recompute": "full"}, 6), ({"sequence_parallel": True}, 5)):
        run = plan(layout=Layout(tensor=2), **changes)
        seconds = step_time(run, CLUSTER, stage_memory(run, 0)).tensor
        assert seconds == about(sums * 8 * 4 * 64 * 64 * 2 / 450e9)


def test_a_pipeline_waits_for_its_first_and_last_transfers_and_the_update_for_the_memory() -> None:
    run = plan(layout=Layout(pipeline=4), micro_batches=8)
    memory = stage_memory(run, 0)
    time = step_time(run, CLUSTER, memory)
    assert time.pipeline == about(2 * 3 * 64 * 64 * 2 / 450e9)
    assert time.update == about(2 * memory.states / 3.35e12)


def test_an_unknown_card_is_refused_with_those_like_it() -> None:
    with pytest.raises(ConfigError, match='no card "h100"; use one of H100 80GB HBM3, H100 PCIe, H100 NVL'):
        card_named("h100")
    with pytest.raises(ConfigError, match="its peak is known"):
        card_named("GB200")
    assert card_named(f"NVIDIA {H100}") == H100


@pytest.mark.parametrize("name", FACTS)
def test_every_card_has_a_peak(name: str) -> None:
    assert Cluster(name).peak("fp16")
