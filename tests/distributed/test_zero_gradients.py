"""ZeRO 1 sums gradients over the data-parallel ranks during the last backward, and trains as torch's path does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from tests.support.museum import exhibit
from tests.support.options import changed
from tests.support.parity import assert_same_tensors
from tests.support.planted import Planted
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import (
    SEQUENCES,
    SGD,
    Job,
    Parts,
    Shard,
    build,
    full_tensors,
    local_batch,
    shards_of,
)

SHAPE, TIED = tiny_shape(layers=4), tiny_shape(layers=4, tied=True)
UNCLIPPED = changed(SGD, gradient_clipping=0.0)
BF16 = changed(UNCLIPPED, precision="bf16")
DP, DP_PP = Layout(data=2), Layout(data=2, pipeline=2)
JOBS: dict[str, Job] = {
    "one micro batch": Job(SHAPE, DP, micro_batch_size=SEQUENCES // 2),
    "four micro batches": Job(TIED, DP, micro_batch_size=1),
    "bf16": Job(SHAPE, DP, optimizer=BF16, dtype=torch.bfloat16),
    "1f1b": Job(TIED, DP_PP),
    "zbv": Job(TIED, DP_PP, schedule="zbv", chunks_per_stage=2),
    "tensor, sequence": Job(SHAPE, Layout(data=2, tensor=2), sequence_parallel=True),
}


def zero_1(job: Job) -> Job:
    dtype = torch.float32 if job.dtype == torch.float64 else job.dtype
    optimizer = BF16 if dtype == torch.bfloat16 else UNCLIPPED
    return replace(job, zero_stage=1, dtype=dtype, optimizer=optimizer, learning_rate=0.1)


# ------------------------------------------------------------------------------------------------ the order of launches

GRADIENT, SUM = "gradient", "sum"


@dataclass(frozen=True)
class Event:
    """A layer's gradient that a backward completed, or the start of a sum over the data-parallel ranks."""

    kind: str
    layer: int = -1
    dtype: torch.dtype | None = None


@contextmanager
def recorded(parts: Parts) -> Iterator[list[Event]]:
    """Yield the events of a step in their order."""
    events: list[Event] = []
    sums = parts.mesh.dense_gradients.group
    start = dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if options.get("group") is sums and tensor.dim() == 1:  # the weight of the batch is a scalar
            events.append(Event(SUM, dtype=tensor.dtype))
        return start(tensor, *arguments, **options)

    def complete(layer: int, _: Tensor) -> None:
        events.append(Event(GRADIENT, layer))

    hooks = [
        # The last gradient of a layer.
        layer.input_layernorm.weight.register_post_accumulate_grad_hook(partial(complete, int(index)))
        for index, layer in parts.stage.model.layers.items()
    ]
    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield events
    for hook in hooks:
        hook.remove()


def events_of_a_step(job: Job, zero: dict[str, Any], keys: dict[str, Any]) -> list[Event]:
    """Return the events of one rank. zero: keys of `zero_optimization`; keys: other keys of DeepSpeed's JSON."""
    job = replace(
        zero_1(job), deepspeed_keys={**keys, "zero_optimization": {"reduce_bucket_size": 2, **zero}}
    )
    parts = build(job)
    with recorded(parts) as events:
        parts.forward_backward(local_batch(job, parts.mesh, 0))
        # The sum of the loss over the ranks ends with the backward.
        events.pop()
        parts.optimizer.reduce_gradients()
    return events


def places(events: list[Event], kind: str) -> list[int]:
    return [place for place, event in enumerate(events) if event.kind == kind]


def summed_in_every_backward(_: Any) -> Callable[..., Any]:
    return lambda buckets, completes: nullcontext() if buckets is None else buckets.last_forward()


@exhibit(
    "DeepSpeed PR#7985",
    subject="gradients",
    there="with gradients summed in fp32, ZeRO 1 added the last micro batch behind the sum over the ranks",
    here="a sum over the ranks begins when the last micro batch has added its gradient",
    fault=Planted("megalite.parallel.pipeline:_watched", summed_in_every_backward),
    case="four micro batches",
    costly=True,
)
@pytest.mark.parametrize("name", cases(JOBS, core=("four micro batches", "zbv")))
def test_sums_start_before_the_last_layer_s_backward(ranks, name):
    job, early = JOBS[name], []
    for events in ranks.run(events_of_a_step, job.layout.world_size, job=job, zero={}, keys={}):
        first = places(events, SUM)[0]
        early.append(first < places(events, GRADIENT)[-1])
        complete = {event.layer for event in events[:first]} - {event.layer for event in events[first:]}
        assert complete, f"the first sum is of gradients to which a later backward adds: {events}"
    # The last weight gradients of a split backward may all come after the last gradient of an input.
    assert any(early) if SCHEDULES[job.schedule].splits_backward else all(early)


def test_without_overlap_sums_start_after_the_last_backward(ranks):
    for events in ranks.run(
        events_of_a_step, 2, job=JOBS["one micro batch"], zero={"overlap_comm": False}, keys={}
    ):
        assert places(events, SUM)[0] > places(events, GRADIENT)[-1], events


@pytest.mark.parametrize(
    ("keys", "dtype"), [({}, torch.float32), ({"communication_data_type": "bf16"}, torch.bfloat16)]
)
def test_gradients_are_summed_in_the_type_that_deepspeed_is_told(ranks, keys, dtype):
    for events in ranks.run(events_of_a_step, 2, job=JOBS["bf16"], zero={}, keys=keys):
        assert {event.dtype for event in events if event.kind == SUM} == {dtype}


# ------------------------------------------------------------------------------------------------------------- numbers


def weights_after_two_steps(job: Job) -> list[Shard]:
    parts = build(job)
    for step in range(2):
        parts.accumulate(local_batch(job, parts.mesh, step))
        parts.update(job.learning_rate)
    return shards_of(parts.replica.parameters, parts.replica.tensors, parts.mesh)


@pytest.mark.parametrize("name", cases(JOBS, core=("four micro batches", "zbv")))
@pytest.mark.parametrize("offload", cases(["none", "optimizer"], core=["none"]))
def test_weights_are_those_of_the_torch_path_to_the_bit(ranks, name, offload):
    zero = replace(zero_1(JOBS[name]), offload=offload)
    jobs = (zero, replace(zero, zero_stage=0, offload="none"))
    weights = [
        full_tensors(
            job.shape,
            [
                shard
                for rank in ranks.run(weights_after_two_steps, job.layout.world_size, job=job)
                for shard in rank
            ],
            add=False,
        )
        for job in jobs
    ]
    assert_same_tensors(*weights, rtol=0)
