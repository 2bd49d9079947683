"""Ranks that divide experts send the bytes that the planner counts, in a whole training step of each layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.sections.training_section import ComputeSettings
from megalite.model import moe
from megalite.ops.router import Routing, route
from megalite.planner.experts import exchanged_values, layers_with_experts
from megalite.planner.planned_run import PlannedRun
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.stages import pipeline_split
from tests.support.options import Recompute
from tests.support.tiny import tiny_shape
from tests.support.training import SEQUENCES, Job, batches, build

DENSE = vars(tiny_shape(layers=3))
# Two experts of a token go round the seven or eight as often as there are tokens on a rank, in each of its layouts.
EVEN, UNEVEN = (
    MixtureShape(**DENSE, experts=ExpertShape(number, 2, 22, first_k_dense_replace=1)) for number in (8, 7)
)
JOB = Job(EVEN, micro_batch_size=2, sequence_length=28, router_balance=0.1)
WHOLE = {"expert_tensor": 1}
LAYOUTS = {
    2: (Layout(data=2, expert=2), Layout(context=2, expert=2), Layout(tensor=2, expert=2, **WHOLE)),
    4: (
        Layout(data=4, expert=4),
        Layout(data=4, expert=2),
        Layout(tensor=2, data=2, expert=2),
        Layout(tensor=2, data=2, expert=4, **WHOLE),
    ),
}
COUNT_BYTES = torch.int64.itemsize


def evenly(logits: Tensor, shape: ExpertShape, correction: Tensor | None) -> Routing:
    """Route token t to experts 2 t and 2 t + 1, modulo their number: equal loads, as the planner has them."""
    chosen = torch.arange(len(logits) * 2).view(-1, 2) % shape.num_experts
    return route(logits + torch.zeros_like(logits).scatter_(1, chosen, 50.0), shape, correction)


@contextmanager
def counted() -> Iterator[dict[bool, int]]:
    """Count the bytes that this rank sends to others: True: of rows; False: of the integers that count them."""
    sent, exchange = {True: 0, False: 0}, dist.all_to_all_single

    def counting(
        output: Tensor, values: Tensor, received: list[int], splits: list[int], **others: Any
    ) -> Any:
        to_others = sum(splits) - splits[dist.get_rank(others["group"])]
        sent[values.is_floating_point()] += to_others * values.shape[1:].numel() * values.element_size()
        return exchange(output, values, received, splits, **others)

    with mock.patch.object(dist, "all_to_all_single", counting), mock.patch.object(moe, "route", evenly):
        yield sent


def sent_in_a_step(jobs: list[Job]) -> list[dict[bool, int]]:
    """Return the bytes that this rank sends for experts in the first step of each job."""
    sums = []
    for job in jobs:
        parts = build(job)
        batch = next(iter(batches(job, parts)))
        with counted() as sent:
            parts.forward_backward(batch)
        sums.append(sent)
    return sums


def planned(job: Job) -> PlannedRun:
    return PlannedRun(
        job.shape,
        job.layout,
        pipeline_split(job.shape.num_hidden_layers, 1),
        job.schedule,
        job.micro_batch_size,
        SEQUENCES // job.layout.data // job.micro_batch_size,
        job.sequence_length,
        "bf16" if job.dtype == torch.bfloat16 else "fp64",
        sequence_parallel=job.sequence_parallel,
        training=ComputeSettings(**job.recompute.settings),
    )


@pytest.mark.parametrize("size", LAYOUTS)
def test_a_step_sends_what_the_planner_counts(ranks, size: int) -> None:
    jobs = [
        replace(JOB, layout=layout, sequence_parallel=layout.tensor > 1, recompute=Recompute(mode), **changes)
        for layout in LAYOUTS[size]
        for mode in ("none", "full")
        for changes in ({"shape": UNEVEN}, {"dtype": torch.bfloat16})
    ]
    for job, sent in zip(
        jobs, zip(*ranks.run(sent_in_a_step, world_size=size, jobs=jobs), strict=True), strict=True
    ):
        run, again = planned(job), job.recompute.mode == "full"
        exchanges = run.micro_batches * layers_with_experts(run)
        rows = exchanges * exchanged_values(run, recomputed=again) * run.weight_bytes
        # With seven experts the ranks send unequally; all together as if none had more.
        assert sum(of_rank[True] for of_rank in sent) == size * rows, job
        others = (run.layout.expert - 1) * job.shape.experts.num_experts * size // run.layout.expert
        assert sum(of_rank[False] for of_rank in sent) == exchanges * (1 + again) * others * COUNT_BYTES, job
