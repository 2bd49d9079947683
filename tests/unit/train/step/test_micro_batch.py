"""training.micro_batch_size = "auto": which sizes are tried, and what follows when memory runs out."""

import shlex
import sys
from pathlib import Path

import pytest

from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.errors import MemoryExhausted, TrainingError
from megalite.launcher.rank.detect import LOOPBACK, local_rank_infos
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.fit import legal_micro_batches
from megalite.train.step.micro_batch import TrialRank, in_micro_batches
from tests.unit.config.runs import changed, write_run

AUTO = {"training.micro_batch_size": "auto", "training.precision": "fp32"}
# In place of Python: the kernel kills micro batches above 4, those of 4 say that memory ran out.
TRIAL = """
import json, os, sys
size = json.load(sys.stdin)["config"]["training"]["micro_batch_size"]
with open({tried!r}, "a") as file:
    print(size, file=file)
{ends}
"""
SHORT_OF_MEMORY = """
if size > 4:
    os.kill(os.getpid(), 9)
if size == 4:
    print("MemoryExhausted: 4 do not fit")
    sys.exit(3)
"""


def loaded(folder: Path, **settings: object) -> RunConfig:
    return load_run(write_run(folder, changed({**AUTO, "training.global_batch_size": 16, **settings}))).config


def chosen(
    folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[RunConfig, str]:
    """Return the choice of one rank whose trials end as `ends`, a program with a name `size`, says."""
    (folder / "trial.py").write_text(TRIAL.format(tried=str(folder / "tried"), ends=ends))
    program = folder / "trial"
    # A line with #! takes no path with a space.
    program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(f'{program}.py')}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    [info] = local_rank_infos(1, folder / "rendezvous")
    rank = TrialRank(info, ParallelMesh.single(), LOOPBACK, 1)
    return in_micro_batches(loaded(folder, **settings), 300, rank, False, None, None)


def tried(folder: Path) -> list[int]:
    return [int(size) for size in (folder / "tried").read_text().split()]


def test_it_is_halved_until_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, why = chosen(tmp_path, SHORT_OF_MEMORY, monkeypatch)
    assert tried(tmp_path) == [16, 8, 4, 2]
    batch = config.batch
    assert (batch.micro_batch_size, batch.micro_batches, batch.global_batch_size) == (2, 8, 16)
    assert why.startswith("micro batch 2 x 8: 16, 8, 4 ran out of memory when tried, of ")


def test_what_the_planner_refuses_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = {"training.memory_limit": 1e-6}
    with pytest.raises(MemoryExhausted, match="the smallest micro batch, 1, does not fit: too much") as error:
        chosen(tmp_path, "print('too much')\nsys.exit(3)", monkeypatch, **limit)
    assert tried(tmp_path) == [1]
    assert "this rank needs by estimate" in str(error.value) and "--training.recompute full" in str(
        error.value
    )


def test_another_failure_is_no_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="micro_batch_size = 16 failed: no card"):
        chosen(tmp_path, "print('no card')\nsys.exit(1)", monkeypatch)
    assert tried(tmp_path) == [16]


def test_only_sizes_that_the_schedule_runs_and_that_fill_the_pipeline_count(tmp_path: Path) -> None:
    def legal(**settings: object) -> list[int]:
        return legal_micro_batches(
            loaded(tmp_path, **{name.replace("__", "."): value for name, value in settings.items()})
        )

    assert legal() == [1, 2, 4, 8, 16]
    assert legal(training__global_batch_size=12, parallel__data=2) == [1, 2, 3, 6]
    # Eight micro batches or more fill two stages; where there are none, the smallest has the most.
    assert legal(parallel__pipeline=2) == [1, 2]
    assert legal(parallel__pipeline=2, training__global_batch_size=4) == [1]


def test_two_numbers_leave_nothing_to_choose(tmp_path: Path) -> None:
    assert loaded(tmp_path, **{"training.micro_batches": 4}).training.micro_batch_size == 4
    open_size = loaded(tmp_path).training
    assert (open_size.micro_batch_size, open_size.micro_batches) == ("auto", None)
