"""Sequence parallelism trains to the same numbers as one process: loss, norm, every gradient, the weights after."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from tests.parity.test_layouts import _assert_equal_to_one_process, _id
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, train_on_rank

LAYOUTS = [Layout(pipeline, data, tensor) for tensor in (2, 4) for pipeline in (1, 2) for data in (1, 2)]
LAYOUTS = [layout for layout in LAYOUTS if layout.world_size <= 8]
DROPOUT = Dropout(0.1, 0.2, 0.1, 0.1)


def _job(shape: ModelShape, layout: Layout, **changes) -> Job:
    return replace(Job(shape, layout, sequence_parallel=True, micro_batch_size=2, steps=2), **changes)


def _check(ranks, reference, job: Job, rtol: float = LAYOUT_RTOL) -> None:
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    alone = reference(
        replace(
            job, layout=Layout(), sequence_parallel=False, schedule="1f1b", chunks_per_stage=1, zero_stage=0
        )
    )
    _assert_equal_to_one_process(job, results, alone, rtol)


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=[Layout(tensor=2), Layout(2, 2, 2)]), ids=_id)
@pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.slow)]
)
def test_layouts_equal_one_process(ranks, reference, layout, tied):
    _check(ranks, reference, _job(tiny_shape(tied=tied), layout))


@pytest.mark.parametrize("family", ["llama with biases", "qwen3 with biases", "gpt2"])
def test_biases_head_norms_and_learned_positions_get_their_whole_gradient(ranks, reference, family):
    _check(ranks, reference, _job(FAMILY_SHAPES[family], Layout(tensor=2, pipeline=2)))


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_schedules_that_split_the_backward(ranks, reference, schedule):
    job = _job(tiny_shape(tied=True), Layout(pipeline=2, tensor=2), schedule=schedule, chunks_per_stage=2)
    _check(ranks, reference, replace(job, micro_batch_size=1))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_dropout_and_recompute(ranks, reference, recompute):
    job = _job(
        tiny_shape(tied=True),
        Layout(data=2, tensor=2),
        dropout=DROPOUT,
        recompute=Recompute(recompute),
    )
    _check(ranks, reference, job)


# qwen3's head norms are each tensor rank's own sums too, with and without sequence parallelism; gpt2 has biases.
@pytest.mark.parametrize(
    ("zero_stage", "family", "changes"),
    cases(
        [
            (1, "qwen3", {}),
            (2, "qwen3", {}),
            (3, "qwen3", {}),
            (2, "qwen3", {"sequence_parallel": False}),
            (3, "qwen3", {"sequence_parallel": False, "recompute": Recompute("full")}),
            (2, "gpt2", {"micro_batch_size": 1, "recompute": Recompute("full"), "dropout": DROPOUT}),
            (3, "gpt2", {"micro_batch_size": 1, "recompute": Recompute("selective"), "dropout": DROPOUT}),
            (3, "llama with biases", {"recompute": Recompute("full", layers=2)}),
        ],
        core=lambda row: row in [(1, "qwen3", {}), (3, "qwen3", {})],
    ),
)
def test_zero(ranks, reference, zero_stage, family, changes):
    job = _job(FAMILY_SHAPES[family], Layout(data=2, tensor=2), zero_stage=zero_stage, steps=3)
    _check(ranks, reference, replace(job, **changes), ZERO_RTOL)
