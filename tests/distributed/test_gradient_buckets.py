"""Sums over the data-parallel ranks start during the last backward, and give what sums after it give, to the bit."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.parallel import gradient_buckets, pipeline
from megalite.topology.axes import Layout
from tests.support.options import Recompute
from tests.support.tiny import tiny_shape
from tests.support.training import SEQUENCES, Job, build, local_batch

JOBS: dict[str, Job] = {
    "one micro batch": Job(tiny_shape(layers=4), layout=Layout(data=2), micro_batch_size=SEQUENCES // 2),
    "two micro batches": Job(tiny_shape(layers=4), layout=Layout(data=2), micro_batch_size=SEQUENCES // 4),
    "recompute": Job(tiny_shape(layers=4), layout=Layout(data=2), recompute=Recompute("full")),
    "1f1b": Job(tiny_shape(layers=4), layout=Layout(data=2, pipeline=2)),
    "zbv": Job(tiny_shape(layers=4), layout=Layout(data=2, pipeline=2), schedule="zbv", chunks_per_stage=2),
    "tensor, sequence": Job(tiny_shape(layers=4), layout=Layout(data=2, tensor=2), sequence_parallel=True),
}


def reduced(job: Job, *, early: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the summed gradients, and for each sum that started the number of parameters without a gradient then."""
    parts, missing = build(job), list[int]()
    tensors, start = parts.replica.tensors, gradient_buckets.start_sums

    def counted(*arguments: Any) -> Any:
        missing.append(sum(each.grad is None for each in tensors.values()))
        return start(*arguments)

    with (
        mock.patch.object(gradient_buckets, "start_sums", counted),
        nullcontext() if early else mock.patch.object(pipeline, "_watched", lambda *_: nullcontext()),
    ):
        parts.accumulate(local_batch(job, parts.mesh, 0))
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}, missing


def both(job: Job) -> tuple[bool, list[int]]:
    """Return whether sums during and after the backward are equal, and how the first ones found the gradients."""
    with mock.patch.object(gradient_buckets, "BUCKET_BYTES", 1):
        during, missing = reduced(job, early=True)
        after, _ = reduced(job, early=False)
    assert during.keys() == after.keys()
    return all(torch.equal(during[name], after[name]) for name in after), missing


@pytest.mark.parametrize("name", JOBS)
def test_sums_during_the_backward_are_those_after_it(ranks, name):
    job = JOBS[name]
    for same, _ in ranks.run(both, world_size=job.layout.world_size, job=job):
        assert same


def test_a_layer_s_sum_starts_while_earlier_layers_have_no_gradient(ranks):
    job = JOBS["one micro batch"]
    for _, missing in ranks.run(both, world_size=2, job=job):
        first, *others = missing
        # Layer by layer; the last sum, after the backward, is that of the embedding, the norm and the head.
        assert len(missing) == 5 and first > 0 and sorted(others, reverse=True) == others
        assert others[-1] == 0
