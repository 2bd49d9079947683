"""ZeRO 1 to 3 train as one process does on the torch path: losses, norms, gradients before the reduction, weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.model import head
from megalite.topology.axes import Layout
from tests.support.museum import exhibit
from tests.support.mutations import FAULTS
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.planted import Planted
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
def without_the_head_s_gradient(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, stage: Any) -> Callable[..., torch.Tensor]:
        run, linear = wrap(self, stage), head.column_linear

        def used_once(*inputs: Any, **arguments: Any) -> torch.Tensor:
            with mock.patch.object(
                head,
                "column_linear",
                lambda x, weight, *rest, **more: linear(x, weight.detach(), *rest, **more),
            ):
                return run(*inputs, **arguments)

        return used_once

    return wrapped


@exhibit(
    "DeepSpeed#8224",
    also=("DeepSpeed PR#8245",),
    subject="gradients",
    there="ZeRO 2 lost a part of the gradient of a module that a step uses twice, as a tied head",
    here="ZeRO 2 and 3 have the gradients of one process, tied and with every number of micro batches",
    fault=Planted("megalite.train.optimizer.deepspeed:DeepSpeedOptimizer.wrap", without_the_head_s_gradient),
    case="2-dp2-tied",
    costly=True,
)
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


def divided_once_a_stage(hand_over: Callable[..., None]) -> Callable[..., None]:
    def divided(self: Any) -> None:
        for tensor in chain.from_iterable(self._zero.params_in_partition):
            if tensor.grad is not None and self._mesh.pp.rank == 0:
                tensor.grad.mul_(0.5)
        hand_over(self)

    return divided


@exhibit(
    "DeepSpeed PR#7967",
    also=("DeepSpeed PR#7981",),
    subject="gradients",
    there="an optimizer offloaded to the CPU was given the gradients of one micro batch alone",
    here="offloaded states are updated with the gradients of every micro batch",
    fault=Planted(
        "megalite.train.optimizer.deepspeed:DeepSpeedOptimizer.wrap",
        FAULTS["a ZeRO stage that drops micro steps it has reduced"].replace,
    ),
    case="2-",
    costly=True,
)
@exhibit(
    "DeepSpeed#8152",
    also=("DeepSpeed PR#8154", "DeepSpeed#7773"),
    subject="gradients",
    there="in a pipeline the gradients were divided by the number of micro batches once a stage",
    here="every stage has the gradients of one process, with ZeRO too",
    fault=Planted("megalite.train.optimizer.deepspeed:ZeroOneGradients.hand_over", divided_once_a_stage),
    case="1-",
    costly=True,
)
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
