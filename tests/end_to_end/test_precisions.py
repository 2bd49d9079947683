"""bf16 and fp16 through the command line: what is said, what is recorded, and what a resumed run keeps."""

from pathlib import Path

import pytest

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.config.load import load_run
from megalite.monitor.jsonl import read_metrics
from megalite.topology.state import EMA, MASTER
from tests.support.jobs import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """One process, without DeepSpeed and with precision "auto"."""
    job = Job.write(tmp_path, tensor=1, pipeline=1)
    text = job.run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    job.run_file.write_text(text.replace('precision = "fp32"\n', ""))
    return job


@pytest.mark.extended
def test_fp16_tells_of_overflows_and_bf16_of_its_price(job: Job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = ("--training.precision", "fp16", "--training.initial_loss_scale_power", "26")
    output = job.run(run, *first, "--training.steps", "6")
    assert "warning: step 1: fp16 overflow in the gradient of model." in output
    records = read_metrics(run / "metrics.jsonl")
    skipped, scales = [[each[key] for each in records] for key in ("skipped_steps", "loss_scale")]
    assert records[0]["grad_norm"] is None and 0 < skipped[-1] < 6
    assert scales[0] == 2.0**26 and scales[-1] == 2.0**26 / 2 ** skipped[-2]
    assert load_run(run / "run.toml", ()).config.training.precision == "fp16"

    output = job.run(run, "--training.steps", "8", "--training.initial_loss_scale_power", "26")
    assert 'training.precision: "auto" stays "fp16", as the run began' in output
    later = read_metrics(run / "metrics.jsonl")
    assert len(later) == 8 and later[:6] == records
    # Neither the scale nor the count starts anew.
    assert later[6]["loss_scale"] <= scales[-1] and later[6]["skipped_steps"] >= skipped[-1]

    output = job.run(
        run, "--training.steps", "10", "--training.precision", "bf16", "--optimizer.ema_decay", "0.9"
    )
    assert "loss_scale" not in read_metrics(run / "metrics.jsonl")[-1]
    latest = find_latest(run / "checkpoints")
    assert latest is not None and {MASTER, EMA} < read_manifest(latest).tensors.keys()


@pytest.mark.extended
def test_an_overflow_of_a_fixed_scale_ends_the_run_at_its_step(job: Job, tmp_path: Path) -> None:
    flags = ("--training.precision", "fp16", "--training.loss_scale", "1e9")
    process = job.start(tmp_path / "run", *flags)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "step 1: fp16 overflows in the gradient of model." in output
    assert 'use training.precision = "bf16"' in output
