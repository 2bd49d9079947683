"""Label smoothing and z-loss are one process's in every layout, where the vocabulary is cut unevenly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megalite.model import head
from megalite.parallel.cross_entropy import IGNORE_INDEX
from megalite.topology.axes import Layout
from tests.distributed.test_zero import assert_equal_to_one_process
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.options import Recompute
from tests.support.parity import LAYOUT_RTOL
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, RankResult, train_on_rank

JOB = Job(tiny_shape(tied=True), micro_batch_size=2, label_smoothing=0.1, z_loss=0.02, steps=2)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(1, 2, 4), Layout(2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("label_smoothing", "z_loss"), cases([(0.2, 0.0), (0.0, 0.01), (0.1, 0.02)], core=[(0.1, 0.02)])
)
def test_the_loss_of_every_layout_is_one_processs(ranks, reference, layout, label_smoothing, z_loss):
    job = replace(JOB, layout=layout, label_smoothing=label_smoothing, z_loss=z_loss)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, reference(replace(job, layout=Layout())), LAYOUT_RTOL)


@pytest.mark.parametrize("kernels", ["reference", pytest.param("fused", marks=needs_library)])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(), {"recompute": Recompute("full")}),
        (Layout(data=2, tensor=2), {"sequence_parallel": True}),
        (Layout(2, 1, 2), {"micro_batch_size": 2}),
        (Layout(pipeline=2), {"schedule": "zbv", "chunks_per_stage": 2}),
    ],
    ids=["alone", "sequence parallel", "pipeline", "zbv"],
)
def test_a_loss_in_chunks_is_the_whole_one(ranks, reference, layout, changes, kernels):
    job = replace(JOB, layout=layout, chunked_loss=5, kernels=kernels, **changes)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, reference(JOB), LAYOUT_RTOL)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_in_chunks_is_the_whole_one_under_zero(ranks, reference, stage):
    job = replace(JOB, layout=Layout(data=2), zero_stage=stage, chunked_loss=5)
    results = ranks.run(train_on_rank, world_size=2, job=job)
    assert_equal_to_one_process(job, results, reference(JOB))


Loss = Callable[..., Tensor]


def _smooth_over_the_shard(loss: Loss) -> Loss:
    """Megatron-LM#7452: the mean of the log probabilities over the vocabulary that the rank holds."""

    def wrong(logits: Tensor, labels: Tensor, loss_mask: Tensor, shard: Any, terms: Any) -> Tensor:
        counted = loss_mask * (labels != IGNORE_INDEX)
        own_mean = -logits.log_softmax(dim=-1).mean(dim=-1) * counted
        plain = loss(logits.clone(), labels, loss_mask, shard, replace(terms, label_smoothing=0.0))
        return (1 - terms.label_smoothing) * plain + terms.label_smoothing * own_mean

    return wrong


def _divide_by_the_shards_size(loss: Loss) -> Loss:
    def wrong(logits: Tensor, labels: Tensor, loss_mask: Tensor, shard: Any, terms: Any) -> Tensor:
        return loss(logits, labels, loss_mask, shard, replace(terms, vocabulary=len(shard.rows)))

    return wrong


def _leave_out_the_gradient_of_z_loss(loss: Loss) -> Loss:
    def wrong(logits: Tensor, *arguments: Any, **form: Any) -> Tensor:
        *others, terms = arguments
        right = loss(logits.detach().clone(), *others, terms, **form)
        without = loss(logits, *others, replace(terms, z_loss=0.0), **form)
        return without + (right - without).detach()

    return wrong


# name -> what stands for vocab_parallel_cross_entropy, given the original
FAULTS: dict[str, Callable[[Loss], Loss]] = {
    "label smoothing over the shard's own vocabulary": _smooth_over_the_shard,
    "label smoothing divided by the shard's size": _divide_by_the_shards_size,
    "z-loss without its gradient": _leave_out_the_gradient_of_z_loss,
}


def train_with(job: Job, fault: str) -> RankResult:
    right = head.vocab_parallel_cross_entropy
    with mock.patch.object(head, "vocab_parallel_cross_entropy", FAULTS[fault](right)):
        return train_on_rank(job)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_departs_from_one_process(ranks, reference, fault):
    alone = reference(JOB)
    job = replace(JOB, layout=Layout(data=2, tensor=2))
    results = ranks.run(train_with, world_size=4, job=job, fault=fault)
    with pytest.raises(AssertionError, match="relative error"):
        _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)
