"""DeepSpeed's engine on the stand-in accelerator: ZeRO's numbers are the CPU's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from megalite.topology.axes import Layout
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, full_tensors, train_on_rank

JOBS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "zero 1 over tp": {"zero_stage": 1, "layout": Layout(tensor=2, data=2)},
    "zero 1, bf16": {"zero_stage": 1, "dtype": torch.bfloat16},
    "zero 3, bf16": {"zero_stage": 3, "dtype": torch.bfloat16},
}
SHAPE = replace(tiny_shape(), num_key_value_heads=8)


# All stages reduce, shard and gather as on the CPU; the table of pairs has them in many layouts.
@pytest.mark.parametrize("name", cases(JOBS, core=("zero 1", "zero 3")))
def test_zero_is_equal_to_the_cpu_to_the_bit(ranks, devices, name):
    job = Job(**{"shape": SHAPE, "layout": Layout(data=2), "steps": 2, "dtype": torch.float32, **JOBS[name]})
    results = [pool.run(train_on_rank, job.layout.world_size, job=job) for pool in (devices, ranks)]
    for device, cpu in zip(*results, strict=True):
        assert_close(device.losses, cpu.losses, rtol=0, what="losses")
        assert_close(device.norms, cpu.norms, rtol=0, what="norms")
    weights = [
        full_tensors(SHAPE, [shard for rank in each for shard in rank.final], add=False) for each in results
    ]
    assert_same_tensors(*weights, rtol=0)


def asked() -> list[Any]:
    accelerator = get_accelerator()
    accelerator.set_device(2)
    there = accelerator.FloatTensor([1.0, 2.0])
    side = accelerator.Stream()
    side.wait_stream(accelerator.default_stream())
    return [
        accelerator.current_device_name(),
        str(there.device),
        accelerator.on_accelerator(there),
        accelerator.pin_memory(torch.ones(2)).is_pinned(),
        accelerator.default_stream() == accelerator.current_stream(),
        accelerator.communication_backend_name(),
        accelerator.memory_allocated() >= there.nbytes,
    ]


def test_deepspeed_is_told_of_it(devices):
    assert devices.run(asked) == [["standin:2", "standin:2", True, True, True, "standin", True]]
