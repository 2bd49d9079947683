"""A loss scale of fp16 means the same at every degree of data parallelism: the same steps overflow."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megalite.topology.axes import Layout
from tests.support.options import changed
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import SGD, Job, build, fp16_allowed, local_batch

# The scale doubles after every step, so that it meets its limit several times.
CLIMBING = {"precision": "fp16", "initial_loss_scale_power": 18, "loss_scale_window": 1}
JOB = Job(tiny_shape(tied=True), optimizer=changed(SGD, **CLIMBING), dtype=torch.float16, steps=7)


def scales_and_skips(job: Job) -> list[tuple[float, bool]]:
    """Return each step's loss scale, and whether the step was skipped."""
    with fp16_allowed():
        parts, steps = build(job), []
        for _ in range(job.steps):
            scale = parts.optimizer.loss_scale
            parts.accumulate(local_batch(job, parts.mesh, 0))
            steps.append((scale, parts.update(job.learning_rate).skipped))
        return steps


@pytest.fixture(scope="module")
def alone(ranks):
    """One process's steps, computed once for each job."""
    return cache(lambda job: ranks.run(scales_and_skips, world_size=1, job=job)[0])


FULL_REDUCTION = {"zero_optimization": {"reduce_scatter": False}}
# ZeRO stage, layout, whether gradients are summed in fp32, keys of DeepSpeed
CASES: list[tuple[int, Layout, bool, dict[str, Any]]] = [
    (0, Layout(data=4), True, {}),
    (1, Layout(data=2), True, {}),
    (3, Layout(data=2), False, {}),
    *((stage, Layout(data=8), fp32, {}) for stage in range(4) for fp32 in (True, False)),
    *((stage, Layout(data=4), False, FULL_REDUCTION) for stage in (1, 2, 3)),
    (1, Layout(pipeline=2, data=4), True, {}),
]


@pytest.mark.parametrize(("stage", "layout", "fp32", "keys"), cases(CASES, core=CASES[:3]))
def test_the_same_steps_overflow_at_every_degree_of_data_parallelism(ranks, alone, stage, layout, fp32, keys):
    job = replace(JOB, optimizer=changed(SGD, **CLIMBING, accumulation="fp32" if fp32 else "model"))
    expected = alone(job)
    assert {skipped for _, skipped in expected} == {True, False}
    job = replace(job, layout=layout, zero_stage=stage, deepspeed_keys=keys)
    for steps in ranks.run(scales_and_skips, world_size=layout.world_size, job=job):
        assert steps == expected
