"""16-bit runs whose gradients and updates are the compiled operators': over layouts, schedules and resumes."""

from dataclasses import replace

import pytest
import torch

from megalite.checkpoint.folder import read_manifest
from megalite.topology.axes import Layout
from tests.distributed.test_precision import (
    ADAMW,
    SMALL_WINDOW,
    curve,
    first_gradients,
    gradient_errors,
    job_of,
    train_with_overflow,
    worst_loss,
)
from tests.support.kernels import needs_library
from tests.support.parity import NARROW_LOSS, about, narrow_bound
from tests.support.selection import cases

pytestmark = needs_library


@pytest.mark.parametrize(
    "dtype", cases([torch.bfloat16, torch.float16], core=[torch.bfloat16]), ids=["bf16", "fp16"]
)
def test_the_curve_is_plain_torchs(ranks, dtype):
    [plain] = ranks.run(curve, job=job_of(dtype), steps=8)
    for layout, changes in ((Layout(), {}), (Layout(2, 2, 1), {"schedule": "zbv", "chunks_per_stage": 2})):
        job = replace(job_of(dtype, layout=layout, kernels="fused", **changes), micro_batch_size=1)
        results = ranks.run(curve, world_size=layout.world_size, job=job, steps=8)
        assert worst_loss(results[0], plain) < NARROW_LOSS


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_sums_over_micro_batches_are_as_exact(ranks, layout):
    [exact] = ranks.run(first_gradients, job=job_of(torch.float64), rounded=True)
    single = gradient_errors(ranks.run(first_gradients, job=job_of(torch.bfloat16))[0], exact)
    job = replace(job_of(torch.bfloat16, layout=layout, kernels="fused"), micro_batch_size=1)
    held = ranks.run(first_gradients, world_size=layout.world_size, job=job)
    errors = gradient_errors([shard for rank in held for shard in rank], exact)
    assert not {name: error for name, error in errors.items() if error > narrow_bound("bf16", single[name])}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(("fused", "reference"), id="fused then reference"),
        pytest.param(("reference", "fused"), id="reference then fused", marks=pytest.mark.extended),
    ],
)
def test_a_run_is_resumed_with_other_kernels(ranks, tmp_path, order):
    """An overflow is left out on the way; the files are alike, and so is what follows."""
    job = replace(job_of(torch.float16, SMALL_WINDOW, layout=Layout(tensor=2)), micro_batch_size=1)
    assert job.optimizer.optimizer.name == ADAMW.optimizer.name

    def run(name: str, kernels: str, steps: int) -> list:
        folder = str(tmp_path / name)
        changed = replace(job, kernels=kernels)
        return ranks.run(train_with_overflow, world_size=2, job=changed, folder=folder, steps=steps)

    whole = run("whole", "reference", 5)
    run("parts", order[0], 3)
    resumed = run("parts", order[1], 5)
    for one, other in zip(whole, resumed, strict=True):
        norms = [[update.grad_norm for update in updates] for updates in (one.updates[3:], other.updates)]
        assert norms[1] == about(norms[0], NARROW_LOSS)
        assert one.scales[3:] == other.scales
    first, second = (read_manifest(tmp_path / name / "step-000005") for name in ("whole", "parts"))
    assert first.optimizer == second.optimizer
    assert first.tensors.keys() == second.tensors.keys()
