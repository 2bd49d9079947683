"""The command line trains with any schedule to the same losses, and goes on from a checkpoint under another one."""

import pytest

from tests.support.jobs import Job, curve
from tests.support.parity import FLOAT32_RTOL, assert_same_curve

FLAGS = ("--model.num_hidden_layers", "5", "--optimizer.schedule", "constant")


@pytest.mark.extended
def test_a_run_changes_its_schedule_between_checkpoints(tmp_path):
    job = Job.write(tmp_path, tensor=1, pipeline=2, data=1)
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    job.run(plain, *FLAGS)
    job.run(mixed, *FLAGS, "--training.steps", "6", "--parallel.schedule", "zbv")
    uneven = ("--parallel.virtual_stages", "2", "--parallel.layers_per_stage", "[1, 2, 1, 1]")
    job.run(mixed, *FLAGS, "--parallel.schedule", "interleaved_zero_bubble", *uneven)
    steps, losses, norms, *_ = zip(*curve(mixed), strict=True)
    other_steps, other_losses, other_norms, *_ = zip(*curve(plain), strict=True)
    assert steps == other_steps == tuple(range(1, 13))
    assert_same_curve(losses, other_losses, rtol=FLOAT32_RTOL)
    assert_same_curve(norms, other_norms, rtol=FLOAT32_RTOL)
