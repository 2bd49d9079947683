"""Fewer key-value heads than tensor-parallel ranks: neighbours share one, and training is that of one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from megalite.topology.layout import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, train_on_rank


@pytest.fixture(scope="module")
def reference(ranks) -> Callable[[Job], RankResult]:
    """The same job in one process, computed once for each job."""

    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return run


def _check(ranks, reference, job: Job, rtol: float = LAYOUT_RTOL) -> None:
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    alone = reference(replace(job, layout=Layout(), sequence_parallel=False, zero_stage=0))
    _assert_equal_to_one_process(job, results, alone, rtol)


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        (Layout(tensor=2), 1),
        (Layout(tensor=4), 1),
        (Layout(tensor=4), 2),
        (Layout(tensor=8), 1),
        (Layout(tensor=8), 2),
        (Layout(pipeline=2, tensor=4), 2),
        (Layout(pipeline=2, data=2, tensor=2), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_torch_path_equals_one_process(ranks, reference, layout, heads, sequence_parallel):
    shape = replace(tiny_shape(tied=True), num_key_value_heads=heads)
    job = Job(shape, layout, sequence_parallel=sequence_parallel, micro_batch_size=2, steps=2)
    if layout.tensor == 8 and sequence_parallel:  # which 12 positions cannot be split over
        job = replace(job, sequence_length=16)
    _check(ranks, reference, job)


def test_biases_and_head_norms_of_shared_heads(ranks, reference):
    shape = replace(FAMILY_SHAPES["qwen3 with biases"], num_key_value_heads=2)
    _check(ranks, reference, Job(shape, Layout(tensor=4), micro_batch_size=2, steps=2))


def test_zero_1_counts_a_shared_head_once(ranks, reference):
    shape = replace(tiny_shape(), num_key_value_heads=1)
    _check(ranks, reference, Job(shape, Layout(data=2, tensor=2), zero_stage=1, steps=5), ZERO_RTOL)
