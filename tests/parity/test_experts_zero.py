"""Mixtures of experts under ZeRO 1, 2 and 3 train to the numbers of one process, or of the torch path in 16 bits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.checkpoint.folder import find_latest
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.state import MASTER
from megalite.train.optimizer import deepspeed
from tests.distributed.test_zero_precision import ADAMW, contents, train_and_save
from tests.parity.test_experts import ADAPTED, ALONE, DENSE, JOB, WHOLE
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.options import changed
from tests.support.parity import ZERO_RTOL, about, assert_close, assert_same_tensors
from tests.support.selection import cases
from tests.support.training import SGD, Job, train_on_rank

# Under ZeRO 2 and 3 as many experts on each rank.
EIGHT = replace(JOB, shape=MixtureShape(**DENSE, experts=ExpertShape(8, 2, 22, first_k_dense_replace=1)))
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"layout": Layout(data=2, expert=2)},
    "dp4 ep2": {"layout": Layout(data=4, expert=2)},
    "cp2 ep2": {"layout": Layout(context=2, expert=2)},
    "tp2 dp2 ep2, cut": {"layout": Layout(tensor=2, data=2, expert=2)},
    "tp2 dp2 ep2, whole": {"layout": Layout(tensor=2, data=2, expert=2, expert_tensor=1), **WHOLE},
}
JOBS = {
    f"ZeRO {stage}, {name}": replace(JOB if stage == 1 else EIGHT, zero_stage=stage, **changes)
    for stage in (1, 2, 3)
    for name, changes in LAYOUTS.items()
}
JOBS |= {
    f"{name}, {what}": replace(job, shape=replace(job.shape, adapter=adapter))
    for name, job in JOBS.items()
    for what, adapter in (("LoRA", ADAPTED["all"]), ("frozen experts", Lora(3, 6.0, ("q_proj", "o_proj"))))
    if name.endswith(("tp2 dp2 ep2, cut", "tp2 dp2 ep2, whole"))
}
JOBS["ZeRO 1, pp2 dp2 ep2"] = replace(JOB, zero_stage=1, layout=Layout(pipeline=2, data=2, expert=2))
# The layers of one rank fill a bucket of this size, those of another, with fewer experts, would not.
JOBS["ZeRO 1, dp2 ep2, small buckets"] = replace(
    JOBS["ZeRO 1, dp2 ep2"], deepspeed_keys={"zero_optimization": {"reduce_bucket_size": 18_500}}
)
# Biases of experts, which ranks that share an expert hold whole.
BIASED = {
    stage: replace(EIGHT.shape, experts=replace(EIGHT.shape.experts, expert_bias=True, router_bias=True))
    for stage in (1, 2, 3)
}
for stage, shape in BIASED.items():
    JOBS[f"ZeRO {stage}, tp2 dp2 ep2, cut, biases"] = replace(
        JOBS[f"ZeRO {stage}, tp2 dp2 ep2, cut"], shape=shape, sequence_parallel=stage == 2
    )
for stage, offload in ((1, "optimizer"), (2, "optimizer"), (3, "parameters")):
    JOBS[f"ZeRO {stage}, dp4 ep2, offloaded"] = replace(JOBS[f"ZeRO {stage}, dp4 ep2"], offload=offload)
# DeepSpeed broadcasts or partitions frozen experts, too.
FROZEN = replace(EIGHT.shape, adapter=Lora(3, 6.0, ("q_proj", "v_proj", "o_proj")))
for stage in (1, 2, 3):
    JOBS[f"ZeRO {stage}, dp4 ep2, LoRA of attention"] = replace(JOBS[f"ZeRO {stage}, dp4 ep2"], shape=FROZEN)
CORE = (
    "ZeRO 1, pp2 dp2 ep2",
    "ZeRO 1, dp2 ep2, small buckets",
    "ZeRO 2, dp4 ep2",
    "ZeRO 3, tp2 dp2 ep2, cut, LoRA",
    "ZeRO 3, tp2 dp2 ep2, cut",
    "ZeRO 2, dp4 ep2, LoRA of attention",
)


@pytest.mark.parametrize("name", cases(tuple(JOBS), core=CORE))
def test_experts_under_zero_equal_one_process(ranks, reference, name):
    job = JOBS[name]
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    alone = reference(replace(job, zero_stage=0, offload="none", deepspeed_keys={}, **ALONE))
    _assert_equal_to_one_process(job, results, alone, ZERO_RTOL)
    for result in results:
        assert result.loads == [about(load, ZERO_RTOL) for load in alone.loads]


# ------------------------------------------------------------------------------------------- 16 bits, and checkpoints

# A step so large that a gradient which a bucket has rounded to bf16 shows in the masters.
BF16 = replace(
    EIGHT, dtype=torch.bfloat16, optimizer=changed(SGD, precision="bf16"), steps=1, learning_rate=30.0
)
IN_BUCKETS = "ZeRO 2, tp2 dp2 ep4, whole"
NARROW = {
    "ZeRO 1, pp2 dp2 ep2": replace(BF16, zero_stage=1, layout=Layout(pipeline=2, data=2, expert=2)),
    "ZeRO 1, dp4 ep2": replace(BF16, zero_stage=1, **LAYOUTS["dp4 ep2"]),
    # The ranks of tp add up gradients of the router and of norms, in more digits than bf16 has.
    IN_BUCKETS: replace(
        BF16, zero_stage=2, layout=Layout(tensor=2, data=2, expert=4, expert_tensor=1), **WHOLE
    ),
    "ZeRO 3, dp4 ep2": replace(BF16, zero_stage=3, **LAYOUTS["dp4 ep2"]),
}


def _save_with_rounded_buckets(job: Job, folder: str) -> None:
    with mock.patch.object(deepspeed, "reduce_in_float32", lambda zero: None):
        train_and_save(job, folder)


def _masters(
    ranks, folder: Path, job: Job, train: Callable[..., Any] = train_and_save
) -> dict[str, torch.Tensor]:
    ranks.run(train, world_size=job.layout.world_size, job=job, folder=str(folder))
    return {name: values for name, values in contents(find_latest(folder)).items() if name.startswith(MASTER)}


@pytest.mark.parametrize("name", cases(tuple(NARROW), core=(IN_BUCKETS,)))
def test_masters_in_bf16_are_those_of_the_torch_path(ranks, tmp_path, name):
    job = NARROW[name]
    expected = _masters(ranks, tmp_path / "torch", replace(job, zero_stage=0))
    assert expected
    assert_same_tensors(_masters(ranks, tmp_path / "zero", job), expected, rtol=ZERO_RTOL)
    if name == IN_BUCKETS:
        rounded = _masters(ranks, tmp_path / "rounded", job, _save_with_rounded_buckets)
        with pytest.raises(AssertionError, match="layernorm"):
            assert_same_tensors(rounded, expected, rtol=ZERO_RTOL)


LAYOUTS_IN_TURN = (
    {"zero_stage": 0, "layout": Layout(tensor=2, expert=2, expert_tensor=1), **WHOLE},
    {"zero_stage": 1, "layout": Layout(data=4, expert=2)},
    {"zero_stage": 0, "layout": Layout(context=2, expert=2)},
    {"zero_stage": 2, "layout": Layout(data=2, expert=2)},
)


def test_a_run_of_experts_changes_stage_and_layout_without_losing_a_digit(ranks, tmp_path):
    """Each loads what the one before has saved, trains nothing, and saves; the last ones train on alike."""
    first = replace(
        EIGHT, zero_stage=3, layout=Layout(data=4, expert=2), dtype=torch.float32, optimizer=ADAMW
    )
    first = replace(first, learning_rate=1e-3)

    def run(job, place: int) -> list[list[float]]:
        folder = str(tmp_path / str(place))
        return ranks.run(train_and_save, world_size=job.layout.world_size, job=job, folder=folder)

    run(first, 0)
    expected = contents(find_latest(tmp_path / "0"))
    for place, changes in enumerate(LAYOUTS_IN_TURN, start=1):
        shutil.copytree(tmp_path / str(place - 1), tmp_path / str(place))
        run(replace(first, **changes), place)
        assert_same_tensors(contents(find_latest(tmp_path / str(place))), expected, rtol=0)
    last = replace(first, steps=3)
    [[alone]] = run(replace(last, zero_stage=0, layout=Layout()), len(LAYOUTS_IN_TURN))
    for [loss] in run(last, 0):
        assert_close(loss, alone, rtol=ZERO_RTOL, what="loss after the checkpoint")
