"""The norms of monitor.layers_every are those of one process in every layout, and those of its tensors."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.place import RankPlace
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.update_norms import UpdateNorms
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, ZERO_RTOL, assert_close
from tests.support.tiny import tiny_shape
from tests.support.training import Job, batches, build

GROUPS = (ParameterGroup("*norm*", learning_rate_ratio=0.5),)
CLIPPED_SGD = OptimizerSettings(OptimizerConfig(name="sgd", gradient_clipping=0.5), groups=GROUPS)
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", ema_decay=0.9), groups=GROUPS)
TIED, UNTIED = tiny_shape(tied=True), tiny_shape(tied=False)
ADAPTER = Lora(2, 4.0, ("q_proj", "v_proj", "down_proj"))
SHARED_HEADS = replace(TIED, num_key_value_heads=1, qk_norm="head")
JOB = Job(TIED, optimizer=CLIPPED_SGD, steps=2)
# The update of a float32 master is a difference of rounded numbers, and keeps its digits if it is large.
ZERO = replace(JOB, learning_rate=200.0, steps=1)
MODULES = ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "final_norm"]


def norms_on_rank(job: Job, fault: str = "") -> list[dict[str, float]]:
    """Return the norms of each step. fault: a rule of RankPlace that says yes to everything."""
    with ExitStack() as stack:
        parts = build(job)
        if fault:
            stack.enter_context(mock.patch.object(RankPlace, fault, lambda *_: True))
        return [*_norms(job, parts)]


def _norms(job: Job, parts: Any) -> Iterator[dict[str, float]]:
    for batch in batches(job, parts):
        parts.accumulate(batch)
        squared_norm = float(parts.mesh.reduce_over_world(parts.optimizer.squared_norm()))
        norms = UpdateNorms(job.shape, job.optimizer.groups, parts.mesh, ops=job.operators)
        update = parts.optimizer.step(job.learning_rate, squared_norm, norms)
        yield {**norms.totals(), "whole": update.grad_norm}


def tensors_on_rank(job: Job) -> dict[str, list[torch.Tensor]]:
    """Return name -> gradient, weight before and weight after of the first step."""
    parts = build(job)
    parts.accumulate(next(batches(job, parts)))
    tensors = parts.replica.trained_tensors
    before = {name: (each.grad.clone(), each.detach().clone()) for name, each in tensors.items()}
    parts.update(job.learning_rate)
    return {name: [*before[name], tensor.detach().clone()] for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def alone(ranks):
    @cache
    def run(job: Job) -> list[dict[str, float]]:
        plain = replace(job, layout=Layout(), zero_stage=0, kernels="reference", sequence_parallel=False)
        return ranks.run(norms_on_rank, world_size=1, job=plain)[0]

    return run


def assert_same_norms(ranks: Any, alone: Any, job: Job, rtol: float, fault: str = "") -> None:
    for steps in ranks.run(norms_on_rank, world_size=job.layout.world_size, job=job, fault=fault):
        for step, (norms, expected) in enumerate(zip(steps, alone(job), strict=True), start=1):
            assert norms.keys() == expected.keys()
            for name, norm in expected.items():
                assert_close(norms[name], norm, rtol=rtol, what=f"{name} of step {step}")


def test_the_norms_of_one_process_are_those_of_its_tensors(ranks, alone) -> None:
    [tensors] = ranks.run(tensors_on_rank, world_size=1, job=JOB)
    norms = alone(JOB)[0]
    own = {"embedding": ["model.embed_tokens"], "final_norm": ["model.norm"], "model": [""]}
    own |= {f"layers.{layer}": [f"model.layers.{layer}."] for layer in range(4)}
    members = {name: [each for each in tensors if each.startswith(*own[name])] for name in own}
    members["*norm*"] = [name for name in tensors if "norm" in name]
    members["default"] = [name for name in tensors if "norm" not in name]
    assert norms.keys() == {
        *(f"{kind}/{name}" for name in members for kind in ("grad_norm", "weight_norm", "update_ratio")),
        "whole",
    }
    for name, names in members.items():
        gradient, weight, after = (
            torch.cat([tensors[each][place].flatten() for each in names]) for place in range(3)
        )
        expected = [gradient.norm(), weight.norm(), (after - weight).norm() / weight.norm()]
        recorded = [norms[f"{kind}/{name}"] for kind in ("grad_norm", "weight_norm", "update_ratio")]
        for norm, value in zip(recorded, expected, strict=True):
            assert_close(norm, value, what=name)
    assert_close(norms["whole"], norms["grad_norm/model"])


FUSED = replace(JOB, optimizer=ADAMW, learning_rate=0.05, kernels="fused")


@pytest.mark.parametrize(
    ("job", "rtol"),
    [
        pytest.param(replace(JOB, layout=Layout(tensor=2), sequence_parallel=True), LAYOUT_RTOL, id="tp2"),
        pytest.param(replace(JOB, layout=Layout(pipeline=2)), LAYOUT_RTOL, id="pp2"),
        pytest.param(replace(JOB, layout=Layout(data=2)), LAYOUT_RTOL, id="dp2"),
        pytest.param(
            replace(ZERO, layout=Layout(data=2), zero_stage=2),
            ZERO_RTOL,
            id="ZeRO 2",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            replace(ZERO, layout=Layout(data=2), zero_stage=3),
            ZERO_RTOL,
            id="ZeRO 3",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            replace(JOB, shape=SHARED_HEADS, layout=Layout(tensor=2)), LAYOUT_RTOL, id="tp2, a shared head"
        ),
        pytest.param(
            replace(ZERO, shape=SHARED_HEADS, layout=Layout(1, 2, 2), zero_stage=3),
            ZERO_RTOL,
            id="ZeRO 3, tp2 dp2, a shared head",
        ),
        pytest.param(replace(ZERO, layout=Layout(2, 2, 1), zero_stage=1), ZERO_RTOL, id="ZeRO 1, pp2 dp2"),
        pytest.param(
            replace(JOB, shape=replace(UNTIED, adapter=ADAPTER), layout=Layout(1, 2, 2)),
            LAYOUT_RTOL,
            id="LoRA, dp2 tp2",
        ),
        pytest.param(replace(FUSED, layout=Layout(2, 2, 1)), LAYOUT_RTOL, id="fused AdamW, pp2 dp2"),
        pytest.param(
            replace(
                FUSED, layout=Layout(tensor=2), optimizer=OptimizerSettings(OptimizerConfig(name="muon"))
            ),
            FLOAT32_RTOL,
            id="Muon, tp2",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_norms_are_those_of_one_process(ranks, alone, job: Job, rtol: float) -> None:
    assert_same_norms(ranks, alone, job, rtol)


@pytest.mark.parametrize(
    ("layout", "fault", "module"),
    [
        pytest.param(Layout(tensor=2), "is_first_holder", "layers.0", id="a replicated norm twice"),
        pytest.param(Layout(pipeline=2), "is_first_stage", "embedding", id="a tied embedding twice"),
    ],
)
def test_a_copy_that_counts_is_seen(ranks, alone, layout: Layout, fault: str, module: str) -> None:
    with pytest.raises(AssertionError, match=f"weight_norm/{module}|grad_norm/{module}"):
        assert_same_norms(ranks, alone, replace(JOB, layout=layout), LAYOUT_RTOL, fault)
