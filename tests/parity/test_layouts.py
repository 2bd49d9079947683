"""Any layout trains to the same numbers as one process: loss, norm, every full gradient, and the weights after."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import SEQUENCES, Job, RankResult, full_gradients, full_tensors, train_on_rank

TIED, UNTIED = tiny_shape(tied=True), tiny_shape(tied=False)
SIZES = (1, 2, 4, 8)
LAYOUTS = [
    Layout(pipeline, data, tensor)
    for pipeline in SIZES[:3]
    for data in SIZES
    for tensor in SIZES[:3]
    if 1 < pipeline * data * tensor <= 8
]
LONG_RUNS = (Layout(2, 2, 2), Layout(4, 2, 1))
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw"))


def _marks(layout: Layout, every_change: Sequence[Layout]) -> tuple[pytest.MarkDecorator, ...]:
    if layout == Layout(2, 2, 2):
        return ()
    return (pytest.mark.extended if layout in every_change else pytest.mark.slow,)


def _rows(layout: Layout) -> int:
    """Sequences of a micro batch: two, which take half of the time, where every stage still has one to work on."""
    return 2 if SEQUENCES // layout.data // 2 >= layout.pipeline else 1


def _id(layout: Layout) -> str:
    return f"tp{layout.tensor}-pp{layout.pipeline}-dp{layout.data}"


@pytest.fixture(scope="module")
def torch_reference(ranks):
    """The same job in one process, on the torch optimizer path, computed once for each job."""

    @cache
    def run(job: Job) -> RankResult:
        alone = replace(
            job,
            layout=Layout(),
            layers_per_stage=None,
            schedule="1f1b",
            chunks_per_stage=1,
            zero_stage=0,
        )
        [result] = ranks.run(train_on_rank, world_size=1, job=alone)
        return result

    return run


def _assert_equal_to_one_process(job: Job, results: list[RankResult], alone: RankResult, rtol: float) -> None:
    for result in results:
        assert_close(result.losses, alone.losses, rtol=rtol, what="losses")
        assert_close(
            result.norms, alone.norms, rtol=max(rtol, ZERO_RTOL if job.zero_stage else 0), what="norms"
        )
    single = replace(job, layout=Layout())
    assert_same_tensors(
        full_tensors(job.shape, [shard for result in results for shard in result.initial], add=False),
        full_tensors(job.shape, alone.initial, add=False),
        # DoRA's magnitudes are sums over tp.
        rtol=LAYOUT_RTOL if isinstance(job.shape.adapter, Lora) and job.shape.adapter.dora else 0,
    )
    assert_same_tensors(full_gradients(job, results), full_gradients(single, [alone]), rtol=rtol)
    assert_same_tensors(
        full_tensors(job.shape, [shard for result in results for shard in result.final], add=False),
        full_tensors(job.shape, alone.final, add=False),
        rtol=rtol,
    )


# Values of each axis alone, of two axes and of all three; the pairwise table has the other values.
CORE = (
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(data=2),
    Layout(4, 2, 1),
    Layout(1, 2, 4),
    Layout(2, 2, 2),
)


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=CORE), ids=_id)
@pytest.mark.parametrize(
    "shape", [pytest.param(TIED, id="tied"), pytest.param(UNTIED, id="untied", marks=pytest.mark.slow)]
)
def test_torch_path_equals_one_process_in_float64(ranks, torch_reference, layout, shape):
    job = Job(shape, layout, micro_batch_size=_rows(layout), steps=2)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    alone = torch_reference(replace(job, layout=Layout(), micro_batch_size=1))
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)


# The table of pairs (test_matrix) has ZeRO in many layouts; here are those with ranks of every axis and of one only.
WITH_ZERO = (Layout(2, 2, 2), Layout(data=8), Layout(4, 2, 1), Layout(1, 2, 4))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=_marks(each, WITH_ZERO), id=_id(each)) for each in LAYOUTS],
)
def test_zero_1_equals_one_process(ranks, torch_reference, layout):
    shape = TIED if layout.pipeline > 1 else UNTIED
    job = Job(shape, layout, micro_batch_size=_rows(layout), zero_stage=1, steps=5)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    alone = torch_reference(replace(job, layout=Layout(), micro_batch_size=1, zero_stage=0))
    _assert_equal_to_one_process(job, results, alone, ZERO_RTOL)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(pipeline=2), {"layers_per_stage": (3, 1)}),
        (Layout(pipeline=2, data=2), {"layers_per_stage": (1, 3), "micro_batch_size": 2}),
        (Layout(pipeline=2, tensor=2), {"schedule": "gpipe"}),
        (Layout(pipeline=4), {"schedule": "gpipe", "micro_batch_size": 4}),
        (Layout(data=2, tensor=2), {"micro_batch_size": 4}),
        (Layout(tensor=2), {"micro_batch_size": 8}),
    ],
    ids=[
        "uneven stages 3+1",
        "uneven stages 1+3",
        "gpipe",
        "fewer micro batches than stages",
        "larger micro batches",
        "no accumulation",
    ],
)
def test_any_split_of_the_batch_and_the_layers_gives_the_same_gradient(
    ranks, torch_reference, layout, changes
):
    job = replace(Job(TIED, layout, steps=2), **changes)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    alone = torch_reference(Job(TIED, steps=2))
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "micro_batch_size"),
    [
        ("interleaved_1f1b", 2, 2, 1),
        ("interleaved_1f1b", 4, 2, 1),
        ("interleaved_1f1b", 2, 3, 2),
        ("looped_bfs", 2, 2, 4),
        ("looped_bfs", 4, 2, 1),
        ("interleaved_zero_bubble", 2, 2, 1),
        ("interleaved_zero_bubble", 4, 2, 1),
        ("zbv", 2, 2, 2),
        ("zbv", 4, 2, 1),
        ("dualpipev", 2, 2, 1),
        ("dualpipev", 4, 2, 1),
    ],
)
@pytest.mark.parametrize("tied", cases([True, False], core=[True]), ids=["tied", "untied"])
def test_every_schedule_equals_one_process(
    ranks, torch_reference, schedule, stages, chunks, micro_batch_size, tied
):
    shape = tiny_shape(tied=tied, layers=9)
    layout = Layout(pipeline=stages)
    job = Job(
        shape, layout, schedule=schedule, chunks_per_stage=chunks, micro_batch_size=micro_batch_size, steps=2
    )
    results = ranks.run(train_on_rank, world_size=stages, job=job)
    _assert_equal_to_one_process(job, results, torch_reference(Job(shape, steps=2)), LAYOUT_RTOL)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=_marks(each, LONG_RUNS), id=_id(each)) for each in LAYOUTS],
)
@pytest.mark.parametrize("zero_stage", cases([0, 1], core=[1]))
def test_twenty_adamw_steps_in_float32_follow_one_process(ranks, torch_reference, layout, zero_stage):
    job = Job(
        TIED,
        layout,
        micro_batch_size=_rows(layout),
        optimizer=ADAMW,
        learning_rate=1e-3,
        dtype=torch.float32,
        steps=20,
        zero_stage=zero_stage,
    )
    alone = torch_reference(replace(job, layout=Layout(), micro_batch_size=1, zero_stage=0))
    assert sum(norm > ADAMW.optimizer.gradient_clipping for norm in alone.norms) >= 10, (
        "clipping must be active"
    )
    for result in ranks.run(train_on_rank, world_size=layout.world_size, job=job):
        assert_close(result.losses, alone.losses, rtol=FLOAT32_RTOL, what="losses")
        assert_close(result.norms, alone.norms, rtol=FLOAT32_RTOL, what="norms")
