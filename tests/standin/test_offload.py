"""Saved tensors that wait in host memory: equal numbers to the bit, fewer bytes on the device, no weight among them."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.model import offload
from megalite.topology.axes import Layout
from tests.standin.test_parity import require_equal
from tests.support.options import Dropout, Recompute
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, build, local_batch, train_on_rank

JOB = Job(tiny_shape(), dropout=Dropout(0.1, 0.1, 0.1), steps=2)
JOBS: dict[str, dict[str, Any]] = {
    "all that layers save": {},
    "inputs of layers": {"recompute": Recompute("full")},
    "chunks": {"recompute": Recompute("selective"), "sequence_chunk": 5, "documents": True},
    "sequence parallel": {"layout": Layout(tensor=2), "sequence_parallel": True},
    "zbv, bf16": {
        "layout": Layout(pipeline=2),
        "schedule": "zbv",
        "chunks_per_stage": 2,
        "dtype": torch.bfloat16,
    },
    "compiled operators": {"kernels": "fused", "dropout": Dropout()},
    "gemma 2": {"shape": FAMILY_SHAPES["gemma2"]},
    "ZeRO 3": {"layout": Layout(data=2), "zero_stage": 3, "dtype": torch.float32},
}
CORE = ("inputs of layers", "zbv, bf16", "ZeRO 3")


def trained(job: Job) -> RankResult:
    """Train with every saved tensor offloaded, whatever its size."""
    with mock.patch.object(offload, "LEAST_BYTES", 1):
        return train_on_rank(job)


def saved_bytes(job: Job) -> tuple[int, int]:
    """Return the bytes that layers save for the backward on the device, without the weights', and on the host."""
    parts = build(job)
    own = {tensor.untyped_storage().data_ptr() for tensor in parts.stage.parameters()}
    kept: dict[str, dict[int, int]] = {"standin": {}, "cpu": {}}
    copy = torch.Tensor.copy_

    def counting(target: torch.Tensor, source: torch.Tensor, *arguments: Any, **how: Any) -> torch.Tensor:
        if target.device.type == "cpu" and source.device.type == "standin":
            assert source.untyped_storage().data_ptr() not in own, "a weight was offloaded"
            kept["cpu"][target.data_ptr()] = target.nbytes
        return copy(target, source, *arguments, **how)

    batch = local_batch(job, parts.mesh, 0)
    with mock.patch.object(offload, "LEAST_BYTES", 1), mock.patch.object(torch.Tensor, "copy_", counting):
        before = torch.accelerator.memory_allocated()
        hidden = parts.stage.whole.decode(batch.input_ids, batch.position_ids)
        after = torch.accelerator.memory_allocated() - hidden.untyped_storage().nbytes()
    return after - before, sum(kept["cpu"].values())


@pytest.mark.parametrize("name", cases(JOBS, core=CORE))
def test_offloaded_activations_change_no_bit(devices, name):
    job = replace(JOB, **JOBS[name])
    plain = devices.run(train_on_rank, job.layout.world_size, job=job)
    offloaded = devices.run(trained, job.layout.world_size, job=replace(job, offload_activations=True))
    for one, other in zip(offloaded, plain, strict=True):
        require_equal(one, other)


def test_what_layers_save_is_on_the_host(devices):
    [(on_device, none)] = devices.run(saved_bytes, 1, job=JOB)
    assert none == 0 < on_device
    [(left, on_host)] = devices.run(saved_bytes, 1, job=replace(JOB, offload_activations=True))
    assert left < on_device / 20 and on_host > 0.9 * on_device
