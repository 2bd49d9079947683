"""data.document_mask through the command line: a run resumes bit for bit."""

from pathlib import Path

import pytest

from tests.support.jobs import Job, curve, tensor_hashes

FLAGS = ("--data.document_mask", "true", "--optimizer.schedule", "constant", "--optimizer.warmup_steps", "0")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job.write(tmp_path, tensor=1, pipeline=1)
    job.run_file.write_text(
        job.run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    )
    return job


@pytest.mark.extended
def test_a_run_with_a_document_mask_goes_on_bit_for_bit(job: Job, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job.run(whole, *FLAGS, "--training.steps", "4")
    job.run(parts, *FLAGS, "--training.steps", "2")
    told = job.run(parts, *FLAGS, "--training.steps", "4")
    assert "resumed after step 2" in told
    assert curve(parts) == curve(whole)
    assert tensor_hashes(parts) == tensor_hashes(whole)
