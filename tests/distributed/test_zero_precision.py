"""16-bit training under ZeRO: its masters and its norm are those of the torch path, whose gradients are summed and
averaged in float32; the loss scale of fp16 goes its way, in a pipeline too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.topology.layout import Coordinates, Layout
from megalite.topology.state import MASTER
from megalite.train.loss_scale import LossScaleSettings
from tests.support.parity import ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import tiny_shape
from tests.support.training import SGD, Job, Parts, build, local_batch

SHAPE = tiny_shape(tied=True)
LARGEST_LOSS_DIFFERENCE = 2e-3


@contextmanager
def fp16_allowed() -> Iterator[None]:
    """DeepSpeed refuses fp16 on a CPU, which computes in it all the same."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        yield


@dataclass
class Curve:
    """Of one rank. masters: after the first step, by name: where each run starts, and its values."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, tuple[int, Tensor]]


def train(job: Job) -> Curve:
    with fp16_allowed():
        parts = build(job)
        result = Curve([], [], {})
        for step in range(job.steps):
            batch = local_batch(job, parts.mesh, step)
            with parts.optimizer.accumulating():
                result.losses.append(parts.pipeline.forward_backward(batch, parts.optimizer.loss_scale))
            result.norms.append(parts.optimizer.step(job.learning_rate).grad_norm)
            if step == 0:
                result.masters = masters(parts)
        return result


def masters(parts: Parts) -> dict[str, tuple[int, Tensor]]:
    return {
        shard.parameter.name: (shard.start, shard.values.clone())
        for shard in parts.optimizer.state.shards()
        if shard.key == MASTER
    }


def joined(job: Job, results: list[Curve]) -> dict[str, Tensor]:
    """The flattened masters of every (pp, tp) by name, from the runs of its data-parallel ranks."""
    whole: dict[str, Tensor] = {}
    for pp in range(job.layout.pipeline):
        for tp in range(job.layout.tensor):
            ranks = [job.layout.rank(Coordinates(pp, dp, tp)) for dp in range(job.layout.data)]
            for name in {name for rank in ranks for name in results[rank].masters}:
                runs = [results[rank].masters[name] for rank in ranks if name in results[rank].masters]
                runs = runs if job.zero_stage else runs[:1]
                ordered = sorted(runs, key=lambda run: run[0])
                ends = [start + values.numel() for start, values in ordered]
                assert [start for start, _ in ordered] == [0, *ends[:-1]], "runs overlap or leave a gap"
                whole[f"{name} of pp {pp} tp {tp}"] = torch.cat([values for _, values in ordered])
    return whole


JOBS = [
    (1, Layout(data=2), "none"),
    (1, Layout(2, 2, 1), "none"),
    (1, Layout(2, 2, 1), "optimizer"),
    (2, Layout(data=2), "none"),
    (2, Layout(data=2), "optimizer"),
    (3, Layout(data=2, tensor=2), "none"),
    (3, Layout(data=2), "optimizer"),
    (3, Layout(data=2), "parameters"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "layout", "offload"), JOBS)
def test_the_masters_are_those_of_the_torch_path(ranks, stage, layout, offload, dtype):
    scale = LossScaleSettings() if dtype == torch.float16 else None
    job = Job(SHAPE, layout, optimizer=replace(SGD, loss_scale=scale), dtype=dtype, steps=5)
    ours = ranks.run(train, world_size=layout.world_size, job=job)
    job = replace(job, zero_stage=stage, offload=offload)
    theirs = ranks.run(train, world_size=layout.world_size, job=job)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(other.norms[0], one.norms[0], rtol=ZERO_RTOL, what="norm")
        assert (
            max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)) < LARGEST_LOSS_DIFFERENCE
        )
    expected = joined(replace(job, zero_stage=0), ours)
    assert_same_tensors(joined(job, theirs), expected, rtol=ZERO_RTOL)
