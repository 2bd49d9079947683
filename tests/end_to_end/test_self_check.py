"""A run whose copies come to differ: it ends with the tensor and the rank named, and saves none of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import Callback, Trainer, load_config
from megalite.checkpoint.folder import find_latest
from megalite.errors import TrainingError
from megalite.monitor.jsonl import read_metrics
from tests.support.jobs import Job, training_here

TENSOR = "model.layers.1.mlp.down_proj.weight"


class FlipsABit(Callback):
    """Flips the lowest bit of one weight on rank 2, after step 4."""

    def on_step_end(self, run: Any, step: Any) -> None:
        if step.step == 4 and run.rank == 2:
            dict(run.model.named_parameters())[TENSOR].data.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_run_ends_before_it_saves_what_differs(tmp_path: Path, zero_stage: int) -> None:
    """Checks are due every 2 steps and before saves, which are at 3, 6, ...: the bit is seen after step 4."""
    run_file = Job.write(tmp_path, tensor=1, pipeline=1, data=3).run_file
    settings: dict[str, Any] = {
        "run": {"folder": str(tmp_path / "run")},
        "monitor": {"self_check_every": 2},
        "training": {"global_batch_size": 6},
    }
    if not zero_stage:
        run_file.write_text(run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", ""))
    with training_here(), pytest.raises(TrainingError) as error:
        Trainer(load_config(run_file, **settings), callbacks=[FlipsABit()]).train()
    text = str(error.value)
    assert f"step 4: the copies of {TENSOR} differ: on rank 2 (pp 0, dp 2, tp 0), where it is not" in text
    assert "step-000003 was written before and is kept" in text
    latest = find_latest(tmp_path / "run" / "checkpoints")
    assert latest is not None and latest.name == "step-000003"
    records = {each["step"]: each for each in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    # Written in the record of the step after.
    assert [step for step, each in records.items() if "self_check_seconds" in each] == [3, 4]
