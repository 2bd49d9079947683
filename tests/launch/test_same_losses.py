"""The deepspeed launcher and torchrun train the same run file to the same losses as megalite's own ranks."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT, Job, curve
from tests.support.waiting import free_port

# In the core test_scripts.py starts the ranks of a run by a real launcher.
pytestmark = pytest.mark.extended
STEPS = ("--training.steps", "6")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    return Job.write(tmp_path_factory.mktemp("job"), tensor=2, pipeline=1, data=2)


@pytest.fixture(scope="module")
def by_itself(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    job.run(folder, *STEPS)
    return curve(folder)


# Every change runs a script of launch/ under one launcher and a user's script under the other.
@pytest.mark.parametrize("script", ["torchrun.sh", pytest.param("deepspeed.sh", marks=pytest.mark.slow)])
def test_a_launcher_gives_the_same_losses(job, by_itself, tmp_path, script):
    environment = {**os.environ, "RUN": str(job.run_file), "RANKS": "4", "PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", str(ROOT / "launch" / script), "--run.folder", str(tmp_path / "run"), *STEPS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert curve(tmp_path / "run") == by_itself


# Without a guard for __name__: the processes that prepare the data are not to run it again.
SCRIPT = """
import os
import sys
from pathlib import Path
from megalite import Callback, Trainer, load_config

class Double(Callback):
    def on_step_end(self, run, report):
        return {{"double_loss": 2 * report.loss}}

result = Trainer(load_config({run_file!r}, *sys.argv[1:]), callbacks=[Double()]).train()
Path("rank-" + os.environ["RANK"]).write_text(str(result.checkpoint))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
# It adds --local-rank to the script's arguments.
LAUNCH = ("-m", "torch.distributed.launch", "--nproc-per-node", "4")
# As a user writes it: with --local_rank among the script's arguments.
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "4")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
        pytest.param(LAUNCH, id="torch.distributed.launch", marks=pytest.mark.slow),
        pytest.param(DEEPSPEED, id="deepspeed"),
    ],
)
def test_a_script_under_a_launcher_gives_the_same_losses(job, by_itself, tmp_path, launcher):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT.format(run_file=str(job.run_file)))
    port = ["--master_port", str(free_port())] if launcher != TORCHRUN else []
    result = subprocess.run(
        [sys.executable, *launcher, *port, str(script), "--run.folder", str(folder), *STEPS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert curve(folder) == by_itself
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["double_loss"] for record in records] == [2 * record["loss"] for record in records]
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in range(4)]
    assert told == [str(folder / "checkpoints" / "step-000006")] * 4
