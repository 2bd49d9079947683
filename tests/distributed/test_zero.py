"""ZeRO 1 to 3 train as one process does on the torch path: losses, norms, gradients before the reduction, weights."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megalite.topology.axes import Layout
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, RankResult, full_gradients, full_tensors, train_on_rank

TIED, UNTIED = tiny_shape(tied=True), tiny_shape(tied=False)


@pytest.fixture(scope="module")
def reference(ranks):
    """The same job in one process, on the torch optimizer path, computed once for each job."""

    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return lambda job: run(replace(job, layout=Layout(), zero_stage=0, offload="none"))


def assert_equal_to_one_process(job: Job, results: list[RankResult], alone: RankResult) -> None:
    for result in results:
        assert_close(result.losses, alone.losses, rtol=ZERO_RTOL, what="losses")
        assert_close(result.norms, alone.norms, rtol=ZERO_RTOL, what="norms")
    assert_same_tensors(whole(job, results, "initial"), whole(job, [alone], "initial"), rtol=0)
    assert_same_tensors(
        full_gradients(job, results), full_gradients(replace(job, layout=Layout()), [alone]), rtol=LAYOUT_RTOL
    )
    assert_same_tensors(whole(job, results, "final"), whole(job, [alone], "final"), rtol=ZERO_RTOL)


def whole(job: Job, results: list[RankResult], what: str) -> dict[str, torch.Tensor]:
    return full_tensors(job.shape, [shard for each in results for shard in getattr(each, what)], add=False)


# Eight sequences a step: four micro batches of one sequence, or two of two, ...
@pytest.mark.parametrize("tied", cases([True, False], core=[True]), ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("layout", "micro_batch_size"),
    [(Layout(), 2), (Layout(data=2), 1), (Layout(data=2, tensor=2), 2), (Layout(data=2), 4)],
    ids=["alone", "dp2", "dp2-tp2", "dp2 without accumulation"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_five_sgd_steps_are_those_of_one_process(ranks, reference, stage, layout, micro_batch_size, tied):
    job = Job(TIED if tied else UNTIED, layout, micro_batch_size=micro_batch_size, zero_stage=stage, steps=5)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    assert_equal_to_one_process(job, results, reference(job))


@pytest.mark.parametrize(
    ("stage", "layout", "offload"),
    [
        (1, Layout(pipeline=2, data=2), "optimizer"),
        (2, Layout(data=2), "optimizer"),
        (3, Layout(data=2, tensor=2), "optimizer"),
        (3, Layout(data=2), "parameters"),
    ],
)
def test_offloaded_state_is_updated_with_all_micro_batches(ranks, reference, stage, layout, offload):
    job = Job(TIED, layout, zero_stage=stage, offload=offload, steps=5)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    assert_equal_to_one_process(job, results, reference(job))
