"""Recompute changes no number: loss, norm, every gradient and the weights after, under every schedule."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megalite.model import mlp
from megalite.ops import choice
from megalite.topology.axes import Layout
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import tiny_shape
from tests.support.training import (
    Job,
    RankResult,
    build,
    full_gradients,
    full_tensors,
    local_batch,
    train_on_rank,
)

DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), dropout=DROPOUT, steps=2)
FULL, SELECTIVE = Recompute("full"), Recompute("selective")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def _job(schedule: str, layout: Layout, how: Recompute) -> Job:
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    return replace(JOB, layout=layout, schedule=schedule, chunks_per_stage=chunks, recompute=how)


@pytest.fixture(scope="module")
def without_recompute(ranks):
    """The job in one process without recompute, computed once."""

    @cache
    def run() -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=JOB)
        return result

    return run


def assert_same_training(job: Job, results: list[RankResult], alone: RankResult) -> None:
    _, *others = results
    rtol = LAYOUT_RTOL if others else 0.0
    for result in results:
        assert_close(result.losses, alone.losses, rtol=rtol, what="losses")
        assert_close(result.norms, alone.norms, rtol=rtol, what="norms")
    assert_same_tensors(full_gradients(job, results), full_gradients(JOB, [alone]), rtol=rtol)
    assert_same_tensors(
        full_tensors(job.shape, [shard for result in results for shard in result.final], add=False),
        full_tensors(job.shape, alone.final, add=False),
        rtol=rtol,
    )


# The pairwise table has every schedule with every kind of recompute, with and without dropout.
@pytest.mark.parametrize("how", [FULL, SELECTIVE], ids=lambda how: how.mode)
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(each, marks=() if each in ("1f1b", "zbv") else pytest.mark.slow) for each in SCHEDULES],
)
def test_every_schedule_recomputes_to_the_same_numbers(ranks, without_recompute, schedule, how):
    job = _job(schedule, Layout(pipeline=2), how)
    results = ranks.run(train_on_rank, world_size=2, job=job)
    assert_same_training(job, results, without_recompute())


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (Layout(), Recompute("full", layers=3)),
        (Layout(), Recompute("selective", ratio=0.5)),
        pytest.param(Layout(tensor=4), FULL, marks=pytest.mark.extended),
        (Layout(tensor=2, data=2), Recompute("full", ratio=0.5)),
        (Layout(pipeline=2, tensor=2), Recompute("full", layers=1)),
        (Layout(tensor=2), SELECTIVE),
    ],
    ids=str,
)
def test_any_choice_of_layers_in_any_layout_gives_the_same_numbers(ranks, without_recompute, layout, how):
    job = _job("1f1b", layout, how)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    assert_same_training(job, results, without_recompute())


def calls_on_rank(job: Job) -> dict[str, int]:
    """How often one step runs a layer's MLP, its attention, an all-reduce."""
    parts = build(job)
    counted: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return function(*arguments, **options)

        return call

    patched = (
        mock.patch.object(mlp.GatedMLP, "forward", counting("mlp", mlp.GatedMLP.forward)),
        mock.patch.object(choice, "causal_attention", counting("attention", choice.causal_attention)),
        mock.patch.object(dist, "all_reduce", counting("all-reduces", dist.all_reduce)),
    )
    with patched[0], patched[1], patched[2]:
        parts.forward_backward(local_batch(job, parts.mesh, 0))
    return dict(counted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_is_computed_once_more_whatever_the_schedule(ranks, schedule):
    """8 micro batches through 4 layers, also where W stands alone: its calls read no saved tensor of the graph."""
    job = replace(_job(schedule, Layout(pipeline=2), FULL), dropout=Dropout())
    calls = ranks.run(calls_on_rank, world_size=2, job=job)
    assert sum(each["attention"] for each in calls) == sum(each["mlp"] for each in calls) == 2 * 32
    plain = ranks.run(calls_on_rank, world_size=2, job=replace(job, recompute=Recompute()))
    assert sum(each["attention"] for each in plain) == 32
    selective = ranks.run(calls_on_rank, world_size=2, job=replace(job, recompute=SELECTIVE))
    assert sum(each["attention"] for each in selective) == 2 * 32
    assert sum(each["mlp"] for each in selective) == 32


def test_recompute_stops_before_the_last_collective(ranks):
    """Recompute repeats only the first of a layer's two all-reduces: no saved tensor depends on the second."""
    job = replace(_job("1f1b", Layout(tensor=2), FULL), dropout=Dropout())
    again = ranks.run(calls_on_rank, world_size=2, job=job)
    plain = ranks.run(calls_on_rank, world_size=2, job=replace(job, recompute=Recompute()))
    assert [one["all-reduces"] - other["all-reduces"] for one, other in zip(again, plain, strict=True)] == [
        32,
        32,
    ]
