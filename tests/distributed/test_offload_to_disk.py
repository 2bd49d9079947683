"""Offload to files (ZeRO-Infinity): the numbers of offload to memory, to the bit, and checkpoints that read them."""

from dataclasses import replace

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from megalite.checkpoint.folder import find_latest
from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.axes import Layout
from megalite.train.optimizer.settings import OptimizerSettings
from tests.distributed.test_native_optimizer import train_and_save
from tests.distributed.test_zero_precision import contents
from tests.support.parity import assert_same_tensors
from tests.support.tiny import tiny_shape
from tests.support.training import Job

# Compiles two operators, once, where libaio is installed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AsyncIOBuilder().is_compatible(), reason="libaio is not installed"),
]
BUILD_SECONDS = 900

# DeepSpeed leaves in memory what has less than a MiB: here all but the embedding.
SHAPE = replace(tiny_shape(tied=True), vocab_size=22001)
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))
STEPS = 4


@pytest.mark.parametrize(
    ("layout", "offload", "dtype"),
    [
        (Layout(data=2), "optimizer", torch.float32),
        (Layout(data=2), "parameters", torch.bfloat16),
        (Layout(tensor=2), "optimizer", torch.float32),
    ],
)
def test_files_hold_what_memory_would(ranks, tmp_path, layout, offload, dtype):
    in_memory = Job(SHAPE, layout, zero_stage=3, offload=offload, dtype=dtype, optimizer=ADAMW)
    on_disk = replace(in_memory, disk=str(tmp_path / "disk"))

    def run(job: Job, folder: str, steps: int) -> list[list[tuple[float, float]]]:
        job = replace(job, steps=steps)
        return ranks.run(
            train_and_save,
            world_size=layout.world_size,
            timeout=BUILD_SECONDS,
            job=job,
            folder=str(tmp_path / folder),
        )

    expected = run(in_memory, "memory", STEPS)
    assert run(on_disk, "files", STEPS) == expected
    files = [*(tmp_path / "disk").rglob("*.swp")]
    assert any(file.name.startswith("exp_avg_sq") for file in files), files
    assert any("params" in file.parts[-3] for file in files) == (offload == "parameters")
    whole = contents(find_latest(tmp_path / "memory"))
    assert_same_tensors(contents(find_latest(tmp_path / "files")), whole, rtol=0)

    second_half = [curve[STEPS // 2 :] for curve in expected]
    for name, first, second in (("to files", in_memory, on_disk), ("from files", on_disk, in_memory)):
        run(first, name, STEPS // 2)
        assert run(second, name, STEPS) == second_half
        assert_same_tensors(contents(find_latest(tmp_path / name)), whole, rtol=0)
