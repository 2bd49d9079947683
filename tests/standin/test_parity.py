"""Training on the stand-in accelerator is training on the CPU, to the bit; so is what a GPU's branches compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.adapter import Prefix
from megalite.topology.axes import Layout
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.options import Dropout, Recompute, changed
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.ranks import RankPool
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, full_gradients, full_tensors, train_on_rank

ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))
MUON = changed(ADAMW, name="muon")
PARTS = ("initial", "gradients", "final")
# Where ranks share keys and values, torch's attention on an accelerator adds their gradients, and ours elsewhere; in
# 16 bits one sees it.
OWN_KEYS = replace(tiny_shape(), num_key_value_heads=8)
PREFIX = Prefix(3, projection=10)
WITH_PREFIX = replace(tiny_shape(), adapter=PREFIX)
WINDOWS_AND_PREFIX = replace(FAMILY_SHAPES["mistral"], adapter=PREFIX)
JOBS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, AdamW": {"optimizer": ADAMW, "learning_rate": 1e-3},
    "tp, Muon": {"layout": Layout(tensor=2), "optimizer": MUON, "learning_rate": 1e-3},
    "bf16": {"shape": OWN_KEYS, "dtype": torch.bfloat16, "optimizer": ADAMW, "learning_rate": 1e-3},
    "dp": {"layout": Layout(data=2)},
    "tp": {"layout": Layout(tensor=2), "recompute": Recompute("selective")},
    "tp with sequence parallelism": {
        "layout": Layout(tensor=4),
        "sequence_parallel": True,
        "dropout": Dropout(0.1, 0.1, 0.1),
    },
    "pp, gpipe": {"layout": Layout(pipeline=2), "schedule": "gpipe"},
    "pp, 1f1b, bf16": {"shape": OWN_KEYS, "layout": Layout(pipeline=4), "dtype": torch.bfloat16},
    "pp, interleaved": {
        "layout": Layout(pipeline=2),
        "schedule": "interleaved_1f1b",
        "chunks_per_stage": 2,
        "recompute": Recompute("full"),
    },
    "pp, zbv": {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2},
    "pp, dualpipev": {"layout": Layout(pipeline=2), "schedule": "dualpipev", "chunks_per_stage": 2},
    "all three axes": {"layout": Layout(tensor=2, data=2, pipeline=2), "shape": tiny_shape(tied=True)},
    "label smoothing, z-loss, chunks": {"label_smoothing": 0.1, "z_loss": 1e-3, "chunked_loss": 5},
}
# Paths of an accelerator that sum in another order than a CPU: torch's attention instead of the compiled operator,
# documents in chunks of queries, the embedding's gradient in a separate tensor.
OTHER_BRANCHES: dict[str, dict[str, Any]] = {
    "documents over dp and tp": {"layout": Layout(tensor=2, data=2), "documents": True},
    "compiled operators": {"kernels": "fused"},
    "compiled, AdamW in one pass": {"kernels": "fused", "optimizer": ADAMW, "learning_rate": 1e-3},
    "compiled, documents": {"kernels": "fused", "documents": True, "layout": Layout(data=2)},
    "compiled, attention dropout over tp": {
        "kernels": "fused",
        "dropout": Dropout(attention=0.25),
        "layout": Layout(tensor=2),
    },
    "a prefix": {"shape": WITH_PREFIX, "layout": Layout(tensor=2, pipeline=2), "sequence_parallel": True},
    "a prefix and documents": {"shape": WITH_PREFIX, "layout": Layout(data=2), "documents": True},
    "compiled, a prefix and windows": {"shape": WINDOWS_AND_PREFIX, "kernels": "fused"},
    "compiled, zbv": {
        "kernels": "fused",
        "layout": Layout(pipeline=2),
        "schedule": "zbv",
        "chunks_per_stage": 2,
    },
}


def on_both(job: Job, ranks: RankPool, devices: RankPool) -> tuple[list[RankResult], list[RankResult]]:
    return tuple(pool.run(train_on_rank, job.layout.world_size, job=job) for pool in (devices, ranks))


def require_equal(device: RankResult, cpu: RankResult) -> None:
    assert device.losses == cpu.losses
    assert device.norms == cpu.norms
    for part in PARTS:
        for one, other in zip(getattr(device, part), getattr(cpu, part), strict=True):
            assert (one.name, one.region, one.partial) == (other.name, other.region, other.partial)
            assert_close(one.values, other.values, rtol=0, what=f"{part}: {one.name}")


def require_close(job: Job, devices: list[RankResult], cpus: list[RankResult]) -> None:
    for device, cpu in zip(devices, cpus, strict=True):
        assert_close(device.losses, cpu.losses, what="losses")
        assert_close(device.norms, cpu.norms, what="norms")
    assert_same_tensors(full_gradients(job, devices), full_gradients(job, cpus))
    weights = [
        full_tensors(job.shape, [shard for rank in each for shard in rank.final], add=False)
        for each in (devices, cpus)
    ]
    assert_same_tensors(*weights)


CORE = ("one rank", "pp, zbv", "all three axes", "label smoothing, z-loss, chunks")


@pytest.mark.parametrize("name", cases(JOBS, core=CORE))
def test_a_job_is_equal_to_the_cpu_to_the_bit(ranks, devices, name):
    job = Job(**{"shape": tiny_shape(), "steps": 2, **JOBS[name]})
    for device, cpu in zip(*on_both(job, ranks, devices), strict=True):
        require_equal(device, cpu)


@pytest.mark.parametrize(
    "name", cases(OTHER_BRANCHES, core=("documents over dp and tp", "compiled operators"))
)
def test_the_branches_of_an_accelerator_compute_the_same(ranks, devices, name):
    job = Job(**{"shape": tiny_shape(), "steps": 2, **OTHER_BRANCHES[name]})
    require_close(job, *on_both(job, ranks, devices))


@pytest.mark.parametrize("family", cases(FAMILY_SHAPES, core=("gpt2", "gemma3")))
def test_a_family_computes_the_same(ranks, devices, family):
    job = Job(FAMILY_SHAPES[family], layout=Layout(tensor=2), documents=True)
    require_close(job, *on_both(job, ranks, devices))
