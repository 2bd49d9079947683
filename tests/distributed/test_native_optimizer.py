"""DeepSpeed's own AdamW: the curve of torch's, and a state that checkpoints carry from the one to the other."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.load import load_checkpoint
from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.axes import Layout
from megalite.topology.parameter_groups import ParameterGroup
from megalite.train.optimizer.deepspeed_ops import replay_steps
from megalite.train.optimizer.settings import OptimizerSettings
from tests.distributed.test_zero_precision import contents
from tests.support.checkpoints import save_checkpoint
from tests.support.parity import BF16_RTOL, FLOAT32_RTOL, ZERO_RTOL, about, assert_same_tensors
from tests.support.tiny import tiny_shape
from tests.support.training import Job, build, local_batch

# Compiles an operator, once for all of them.
pytestmark = pytest.mark.slow
BUILD_SECONDS = 900

SHAPE = tiny_shape(tied=True)
GROUPS = (ParameterGroup("*.mlp.*", learning_rate_ratio=0.5, weight_decay=0.3),)
OURS = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5), groups=GROUPS)
NATIVE = replace(OURS, native=True)
STEPS = 10

JOBS = [
    (1, Layout(2, 2, 1), "none", torch.float32),
    (2, Layout(data=2), "optimizer", torch.float32),
    (3, Layout(data=2), "parameters", torch.float32),
    (2, Layout(data=2), "optimizer", torch.bfloat16),
]


def train_and_save(job: Job, folder: str) -> list[tuple[float, float]]:
    """Losses and norms from the folder's latest checkpoint, if any, up to step `job.steps`, then save."""
    latest = find_latest(Path(folder))
    parts = build(replace(job, seed=99) if latest else job)
    first = load_checkpoint(latest, parts.replica, parts.optimizer.state).step if latest else 0
    curve = []
    for step in range(first, job.steps):
        loss = parts.accumulate(local_batch(job, parts.mesh, step))
        curve.append((loss, parts.update(1e-3 * (step + 1) / STEPS).grad_norm))
    counters = {"step": job.steps, "samples": 8 * job.steps, "tokens": 96 * job.steps}
    save_checkpoint(Path(folder), parts.replica, parts.optimizer.state, trainer_state=counters, config={})
    return curve


@pytest.mark.parametrize(("stage", "layout", "offload", "dtype"), JOBS)
def test_it_updates_as_torch_does_and_goes_on_where_it_stopped(
    ranks, tmp_path, stage, layout, offload, dtype
):
    def run(name: str, settings: OptimizerSettings, steps: int = STEPS) -> list[list[tuple[float, float]]]:
        job = Job(SHAPE, layout, zero_stage=stage, offload=offload, dtype=dtype, steps=steps)
        return ranks.run(
            train_and_save,
            world_size=layout.world_size,
            timeout=BUILD_SECONDS,
            job=replace(job, optimizer=settings),
            folder=str(tmp_path / name),
        )

    def same(found: list[list[tuple[float, float]]], expected: list[list[tuple[float, float]]]) -> None:
        for one, other in zip(found, expected, strict=True):
            rtol = ZERO_RTOL if dtype == torch.float32 else BF16_RTOL
            assert one == [about(pair, rtol) for pair in other]

    native, ours = run("native", NATIVE), run("ours", OURS)
    assert all(norm > 0.5 for _, norm in native[0]), "clipping is not active"
    same(native, ours)
    if dtype == torch.float32:
        found, expected = (contents(find_latest(tmp_path / name)) for name in ("native", "ours"))
        assert_same_tensors(found, expected, rtol=FLOAT32_RTOL)
    run("parts", NATIVE, STEPS // 2)
    assert run("parts", NATIVE) == [curve[STEPS // 2 :] for curve in native]
    found, expected = (contents(find_latest(tmp_path / name)) for name in ("parts", "native"))
    assert_same_tensors(found, expected, rtol=0)
    run("mixed", OURS, STEPS // 2)
    same(run("mixed", NATIVE), [curve[STEPS // 2 :] for curve in ours])


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_replayed_steps_leave_the_bias_correction_of_the_run(betas):
    """Taken up before any step, whatever was updated before; without, some steps depart from the run."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 33)) for _ in range(3)]
    run, resumed, without = (DeepSpeedCPUAdam([weight], lr=0.1, betas=betas) for weight in weights)
    departed = 0
    for step in range(100):
        for other, weight, replayed in ((resumed, weights[1], step), (without, weights[2], 0)):
            weight.data.copy_(weights[0])
            other.state[weight] = copy.deepcopy(run.state[weights[0]])
            replay_steps(other, replayed)
        gradient = torch.sin(weights[0].detach() * 9 * (step + 1))
        for optimizer, weight in zip((run, resumed, without), weights, strict=True):
            weight.grad = gradient
            optimizer.step()
        assert torch.equal(weights[1], weights[0]), f"step {step + 1}"
        departed += not torch.equal(weights[2], weights[0])
    assert departed
