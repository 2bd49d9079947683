"""Fewer key-value heads than tensor-parallel ranks: neighbours share one, and training is that of one process."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, train_on_rank


def _check(ranks, reference, job: Job, rtol: float = LAYOUT_RTOL) -> None:
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    alone = reference(replace(job, layout=Layout(), sequence_parallel=False, zero_stage=0))
    _assert_equal_to_one_process(job, results, alone, rtol)


LAYOUTS = [
    (Layout(tensor=2), 1),
    (Layout(tensor=4), 1),
    (Layout(tensor=4), 2),
    (Layout(tensor=8), 1),
    (Layout(tensor=8), 2),
    (Layout(pipeline=2, tensor=4), 2),
    (Layout(pipeline=2, data=2, tensor=2), 1),
]


@pytest.mark.parametrize(("layout", "heads"), cases(LAYOUTS, core=[(Layout(tensor=4), 2)]), ids=str)
def test_torch_path_equals_one_process(ranks, reference, layout, heads):
    shape = replace(tiny_shape(tied=True), num_key_value_heads=heads)
    _check(ranks, reference, Job(shape, layout, micro_batch_size=2, steps=2))


@pytest.mark.parametrize("heads", cases([1, 2], core=[2]))
def test_with_sequence_parallelism(ranks, reference, heads):
    shape = replace(tiny_shape(), num_key_value_heads=heads)
    job = Job(shape, Layout(data=2, tensor=4), sequence_parallel=True, micro_batch_size=2, steps=2)
    _check(ranks, reference, job)


def test_biases_and_head_norms_of_shared_heads(ranks, reference):
    shape = replace(FAMILY_SHAPES["qwen3 with biases"], num_key_value_heads=2)
    _check(ranks, reference, Job(shape, Layout(tensor=4), micro_batch_size=2, steps=2))


@pytest.mark.parametrize("zero_stage", cases([1, 2], core=[1]))
def test_zero_counts_a_shared_head_once(ranks, reference, zero_stage):
    shape = replace(tiny_shape(), num_key_value_heads=1)
    job = Job(shape, Layout(data=2, tensor=2), zero_stage=zero_stage, steps=5)
    _check(ranks, reference, job, ZERO_RTOL)
