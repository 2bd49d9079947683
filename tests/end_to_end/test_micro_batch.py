"""A run that chooses its micro batch is, from its first step on, the run whose file names that size."""

import json
from pathlib import Path

import pytest

from tests.support.jobs import Job

AUTO = ("--training.micro_batch_size", "auto", "--deepspeed.zero_optimization.stage", "0")
SIZED = ("--training.micro_batch_size", "4", "--deepspeed.zero_optimization.stage", "0")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ranks_choose_one_size_and_write_it_down(tmp_path: Path) -> None:
    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    said = job.run(tmp_path / "run", *AUTO, "--training.steps", "1")
    assert "micro batch 4 x 1: the largest of 1, 2, 4 that fits " in said and "; tried for two steps" in said
    written = (tmp_path / "run" / "run.toml").read_text()
    assert "micro_batch_size = 4\n" in written and "memory_limit" not in written


@pytest.mark.extended
def test_the_trial_leaves_no_trace_and_a_resumed_run_keeps_the_size(tmp_path: Path) -> None:
    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    chosen, sized = tmp_path / "chosen", tmp_path / "sized"
    job.run(chosen, *AUTO, "--training.steps", "3")
    assert "micro batch 4 x 1: as in the checkpoint" in job.run(chosen, *AUTO, "--training.steps", "4")
    job.run(sized, *SIZED, "--training.steps", "3")
    job.run(sized, *SIZED, "--training.steps", "4")
    assert losses(chosen) == losses(sized)


@pytest.mark.extended
def test_a_limit_that_nothing_fits_is_an_error(tmp_path: Path) -> None:
    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    process = job.start(tmp_path / "run", *AUTO, "--training.memory_limit", "0.01")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert "the smallest micro batch, 1, does not fit: " in said
    assert "are more than 10 MiB" in said
