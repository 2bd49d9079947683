"""Ranks that share sequences send what the planner counts, in a whole training step of each method."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from megalite.topology.axes import Layout
from megalite.topology.context import CONTEXT_METHODS, ContextSizes, context_traffic
from tests.support.options import Recompute
from tests.support.tiny import tiny_shape
from tests.support.training import Job, batches, build

# Of 8 heads and 2 of keys and values, 4 ranks have too few of the latter for Ulysses.
SHAPE = replace(tiny_shape(layers=2), num_key_value_heads=2)
JOB = Job(SHAPE, micro_batch_size=2, sequence_length=32)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the elements that this rank sends to others, by what each collective means. Gradients are all-reduced."""
    sent: list[int] = []
    size = dist.get_world_size()
    messages = dist.batch_isend_irecv

    def to_each(copies: int, name: str):
        collective = getattr(dist, name)

        def counting(output: Tensor, values: Tensor, **others):
            sent.append(values.numel() // copies * (size - 1))
            return collective(output, values, **others)

        return mock.patch.object(dist, name, counting)

    def counting_messages(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(each.tensor.numel() for each in operations if each.op is dist.isend)
        return messages(operations)

    with (
        to_each(1, "all_gather_single"),
        to_each(size, "reduce_scatter_single"),
        to_each(size, "all_to_all_single"),
        mock.patch.object(dist, "batch_isend_irecv", counting_messages),
    ):
        yield sent


def sent_in_a_step(jobs: list[Job]) -> list[int]:
    """Return the elements that this rank sends between the ranks of its sequences in the first step of each job."""
    sums = []
    for job in jobs:
        parts = build(job)
        batch = next(iter(batches(job, parts)))
        with counted() as sent:
            parts.forward_backward(batch)
        sums.append(sum(sent))
    return sums


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_sends_what_the_planner_counts(ranks, size) -> None:
    layout = Layout(context=size)
    jobs = [
        replace(JOB, layout=layout, context_method=method, recompute=Recompute(mode))
        for method in CONTEXT_METHODS
        for mode in ("none", "full")
    ]
    expected = [
        SHAPE.num_hidden_layers
        * context_traffic(
            ContextSizes.of(SHAPE, layout, 8 * JOB.sequence_length // size),
            job.context_method,
            recomputed=job.recompute.mode == "full",
        )
        for job in jobs
    ]
    assert ranks.run(sent_in_a_step, world_size=size, jobs=jobs) == [expected] * size
