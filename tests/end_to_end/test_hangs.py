"""A rank that stops, sleeps or leaves a collective: the run ends, and names that rank, what it did and where."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite import Callback, Trainer, load_config
from megalite.checkpoint import unpublished
from megalite.checkpoint.tensor_file import write_tensor_file
from megalite.data.batches.loader import StepLoader
from megalite.errors import RankFailure
from megalite.train.step.train_step import TrainStep
from tests.support.jobs import ROOT, Job, training_here
from tests.support.waiting import PATIENCE

# The step in which a rank hangs: the run is past its first steps by then.
HANGS_IN = 6
# A run that a callback, a reader or a disk delays ends after half of the time of a collective.
LIMITS: dict[str, Any] = {"monitor": {"hang_seconds": 1.0}, "launch": {"collective_seconds": 24.0}}


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


_step_batch, _train_step = StepLoader.step_batch, TrainStep.train_step


FAULTS: dict[str, Callable[[Any], object]] = {
    "sleeps": lambda _: sleep_for_ever(),
    "stops": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
}


class InRankOne(Callback):
    """Does something in rank 1 between two steps."""

    def __init__(self, does: Callable[[Any], object]):
        self._does = does

    def on_step_end(self, run: Any, step: Any) -> None:
        if step.step == HANGS_IN - 1 and run.rank == 1:
            self._does(run)


class SleepsIn(Callback):
    """Sleeps in a forward or a backward of rank 1."""

    def __init__(self, *, backward: bool):
        self._backward = backward

    def on_train_start(self, run: Any) -> None:
        if run.rank != 1:
            return
        module = next(module for name, module in run.model.named_modules() if name.endswith("mlp"))

        def hook(*_: Any) -> None:
            if run.state.step == HANGS_IN - 1:
                sleep_for_ever()

        (module.register_full_backward_hook if self._backward else module.register_forward_hook)(hook)


def train(folder: Path, layout: dict[str, int], *callbacks: Callback, **settings: Any) -> list[str]:
    """Return the lines of the failure that ends a run."""
    run_file = Job.write(folder, **{"tensor": 1, "pipeline": 1, **layout}).run_file
    changes = {"run": {"folder": str(folder / "run")}, **LIMITS, **settings}
    with training_here(), pytest.raises(RankFailure) as failure:
        Trainer(load_config(run_file, **changes), callbacks=callbacks).train()
    return str(failure.value).splitlines()


def require(lines: list[str], *, rank: int, doing: str, function: str = "", step: int = HANGS_IN) -> None:
    """Require that one rank is named as the one waited for, with what it does and the function in which it is."""
    text = "\n".join(lines)
    assert re.match(rf"step {step} hangs: no rank has moved for \d+ s", lines[0]), text
    assert lines[1].startswith(f"  rank {rank} (") and doing in lines[1], text
    assert sum(line.startswith("  rank ") and " on " in line for line in lines) <= 2, text
    if function:
        assert any(line.endswith(f" in {function}") for line in lines), text


def test_a_callback_that_sleeps_is_named_with_its_line(tmp_path: Path) -> None:
    lines = train(tmp_path, {"data": 2}, InRankOne(FAULTS["sleeps"]))
    require(lines, rank=1, doing="between two steps", function="sleep_for_ever")
    assert any(__file__ in line for line in lines)
    assert any(line.startswith("  rank 0: ") and "waits in" in line for line in lines)


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    lines = train(tmp_path, {"tensor": 2, "pipeline": 2}, InRankOne(FAULTS["stops"]))
    require(lines, rank=1, doing="its process is stopped (SIGSTOP)")


@pytest.mark.extended
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", [{"tensor": 2, "pipeline": 2}, {"data": 2}])
def test_a_rank_that_sleeps_in_its_computation_is_named(
    tmp_path: Path, layout: dict[str, int], backward: bool
) -> None:
    lines = train(tmp_path, layout, SleepsIn(backward=backward))
    require(lines, rank=1, doing="forward and backward", function="sleep_for_ever")


@pytest.mark.extended
def test_a_rank_that_is_in_another_collective_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits in a barrier of the world before its step, and the others in the sums of theirs."""

    def step(trainer: TrainStep, *arguments: Any) -> Any:
        if trainer.state.step == HANGS_IN - 1 and trainer.mesh.rank == 1:
            trainer.mesh.barrier()
        return _train_step(trainer, *arguments)

    monkeypatch.setattr(TrainStep, "train_step", step)
    require(train(tmp_path, {"data": 4}), rank=1, doing="waits in barrier over world")


@pytest.mark.extended
def test_reading_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(loader: StepLoader, samples: int, **arguments: Any) -> Any:
        if samples >= 8 * (HANGS_IN - 1) and dist.get_rank() == 1:
            sleep_for_ever()
        return _step_batch(loader, samples, **arguments)

    monkeypatch.setattr(StepLoader, "step_batch", read)
    # A batch is read in the step before it.
    require(train(tmp_path, {"data": 2}), rank=1, doing="waiting for the batch", step=HANGS_IN - 1)


@pytest.mark.extended
def test_a_save_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            sleep_for_ever()
        return write_tensor_file(path, *arguments)

    monkeypatch.setattr(unpublished, "write_tensor_file", write)
    every = {"checkpoint": {"every": HANGS_IN - 1}, "training": {"steps": HANGS_IN - 1}}
    lines = train(tmp_path, {"data": 2}, **every)
    require(lines, rank=1, doing="saving a checkpoint", function="sleep_for_ever")


SCRIPT = """
import sys
from megalite import Trainer, load_config
from tests.end_to_end.test_hangs import FAULTS, LIMITS, InRankOne
config = load_config(sys.argv[1], run={"folder": sys.argv[2]}, **LIMITS)
Trainer(config, callbacks=[InRankOne(FAULTS[sys.argv[3]])]).train()
"""


@pytest.mark.extended
@pytest.mark.parametrize("fault", FAULTS)
def test_under_torchrun_the_rank_is_named_by_all(tmp_path: Path, fault: str) -> None:
    """Rank 0 coordinates: it asks the rank where it is; a stopped one does not answer."""
    job = Job.write(tmp_path, tensor=1, pipeline=1, data=2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(script, job.run_file, tmp_path / "run", fault),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert ended.returncode, ended.stdout
    lines = ended.stderr[ended.stderr.index(f"step {HANGS_IN} hangs") :].splitlines()
    require(lines, rank=1, doing={"sleeps": "between two steps", "stops": "does not answer"}[fault])
    if fault == "sleeps":
        assert any("in sleep_for_ever" in line for line in lines), lines
