"""Experts divided over tensor- and context-parallel ranks generate and score as one process does."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalite.evaluate.scoring import score_batch
from megalite.evaluate.windows import Window
from megalite.generation.request import GREEDY, Request
from megalite.generation.token_engine import TokenEngine
from megalite.model import moe
from megalite.model.kv_cache import CacheSize
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from tests.parity.test_context_prefill import LONGEST, numbers, run
from tests.support.generation import load_model
from tests.support.parity import LAYOUT_RTOL, assert_close, relative_error
from tests.support.selection import cases
from tests.support.tiny import MIXTURE_SHAPES, tiny_shape
from tests.unit.convert.exporting import lively_stage, save_stage

# Five experts, which no number of ranks divides; eight in groups, beside shared ones.
SHARED = ExpertShape(
    8, 3, 22, 20, router_scores="sigmoid", routed_scaling_factor=2.5, n_group=4, topk_group=2
)
SHAPES = {
    "qwen3_moe": MIXTURE_SHAPES["qwen3_moe, dense layers, windows, biases"],
    "shared": MixtureShape(**vars(tiny_shape()), experts=replace(SHARED, decoder_sparse_step=2)),
}
LAYOUTS = {
    "tp2 ep2": Layout(tensor=2, expert=2, expert_tensor=1),
    "cp2 ep2": Layout(context=2, expert=2, expert_tensor=1),
    "cp2 tp2 ep2": Layout(context=2, tensor=2, expert=2, expert_tensor=2),
    "cp2 tp2 ep4": Layout(context=2, tensor=2, expert=4, expert_tensor=1),
    "tp4 ep2": Layout(tensor=4, expert=2, expert_tensor=2),
    "pp2 tp2 ep2": Layout(pipeline=2, tensor=2, expert=2, expert_tensor=1),
}


def checkpoint_of(name: str, folder: Path) -> Path:
    shape = replace(SHAPES[name], max_position_embeddings=LONGEST)
    return save_stage(folder, shape, lively_stage(shape, scale=8.0))


def run_with(fault: Callable[[Any], Any], **arguments: Any) -> Any:
    with mock.patch.object(moe, "own_experts", fault(moe.own_experts)):
        return run(**arguments)


def _of_first_rank(own_experts: Any) -> Any:
    """Each rank takes its weights for those of the first experts."""
    return lambda tokens, routing, experts, compute: own_experts(
        tokens, routing, range(len(experts)), compute
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(
        [(name, layout) for name in SHAPES for layout in LAYOUTS],
        core=[("qwen3_moe", "tp2 ep2"), ("shared", "cp2 tp2 ep4")],
    ),
)
def test_tokens_and_log_probabilities_are_those_of_one_process(
    ranks, tmp_path: Path, name: str, layout: str
) -> None:
    checkpoint, size = checkpoint_of(name, tmp_path), LAYOUTS[layout].world_size
    tokens, logs = numbers(run(checkpoint, Layout(), 512)[0])
    for chunk in (50, 512):
        for sampled, _ in ranks.run(run, size, checkpoint=checkpoint, layout=LAYOUTS[layout], chunk=chunk):
            found = numbers(sampled)
            assert found[0] == tokens
            assert_close(found[1], logs, rtol=LAYOUT_RTOL)
    if (name, layout) == ("qwen3_moe", "tp2 ep2"):
        arguments = {"checkpoint": checkpoint, "layout": LAYOUTS[layout], "chunk": 512}
        for sampled, _ in ranks.run(run_with, size, fault=_of_first_rank, **arguments):
            assert relative_error(numbers(sampled)[1], logs) > LAYOUT_RTOL


def scored(checkpoint: Path, layout: Layout) -> list[torch.Tensor]:
    """Return the log-probabilities of the targets of windows of several lengths."""
    mesh = ParallelMesh.over_world(layout) if layout.world_size > 1 else None
    model, generator = load_model(checkpoint, mesh, torch.float64), torch.Generator().manual_seed(2)
    lengths = torch.arange(3, 80, 19).tolist()
    ids = [torch.randint(90, (length,), generator=generator).tolist() for length in lengths]
    windows = [Window(tokens[:-1], tokens[-2:], None) for tokens in ids]
    with torch.inference_mode():
        logs, _ = score_batch(model, windows) or (torch.empty(0), None)
    return logs


@pytest.mark.parametrize(
    ("name", "layout"),
    cases(
        [
            ("qwen3_moe", Layout(data=2, tensor=2, expert=2, expert_tensor=1)),
            ("shared", Layout(context=3, expert=3, expert_tensor=1)),
            ("qwen3_moe", Layout(context=2, tensor=2, expert=2, expert_tensor=2)),
        ],
        core=[("shared", Layout(context=3, expert=3, expert_tensor=1))],
    ),
)
def test_windows_are_scored_as_by_one_process(ranks, tmp_path: Path, name: str, layout: Layout) -> None:
    checkpoint = checkpoint_of(name, tmp_path)
    expected = scored(checkpoint, Layout())
    for logs in ranks.run(scored, layout.world_size, checkpoint=checkpoint, layout=layout):
        assert_close(logs, expected, rtol=LAYOUT_RTOL)


def collectives(checkpoint: Path, layout: Layout) -> Counter[str]:
    """Return the collectives of a decode step."""
    model = load_model(checkpoint, ParallelMesh.over_world(layout), torch.float64)
    engine = TokenEngine(model, CacheSize(2, LONGEST))
    for number in range(2):
        engine.submit(number, Request((1, 2, 3 + number), 3, GREEDY, frozenset()))
    engine.step()
    counts: Counter[str] = Counter()
    with mock.patch.multiple(dist, **{name: _counted(name, counts) for name in _COLLECTIVES}):
        engine.step()
    return counts


_COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather", "all_gather_single", "reduce_scatter_single")


def _counted(name: str, counts: Counter[str]) -> Callable[..., Any]:
    collective = getattr(dist, name)

    def call(*arguments: Any, **settings: Any) -> Any:
        counts[name] += 1
        return collective(*arguments, **settings)

    return call


@pytest.mark.parametrize(
    ("layout", "more"),
    [("tp2 ep2", 0), ("cp2 tp2 ep4", 2)],
)
def test_a_decode_step_sums_once_more_a_layer_at_most(ranks, tmp_path: Path, layout: str, more: int) -> None:
    """Two of the four layers have experts. Over tensor-parallel ranks their sum takes the place of the MLP's."""
    checkpoint = checkpoint_of("shared", tmp_path)
    plain = replace(LAYOUTS[layout], expert=1, expert_tensor=None)
    size = plain.world_size
    before = ranks.run(collectives, size, checkpoint=checkpoint, layout=plain)
    after = ranks.run(collectives, size, checkpoint=checkpoint, layout=LAYOUTS[layout])
    assert before[0]["all_reduce"] > 0
    assert after == [{**counts, "all_reduce": counts["all_reduce"] + more} for counts in before]
