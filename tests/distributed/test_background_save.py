"""Asynchronous checkpoints equal, bit for bit, those of a run that waits for its saves."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.staging import Staging
from megalite.train.checkpoints.saving import RunSaver
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "tp2-average": {"parallel.tensor": 2, "optimizer.ema_decay": 0.9},
    "pp2-bf16": {"parallel.pipeline": 2, "training.precision": "bf16"},
    "zero2-offload": {
        "parallel.data": 2,
        "deepspeed.zero_optimization.stage": 2,
        "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
        "optimizer.ema_decay": 0.9,
    },
    "zero3-dp2": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 3},
    "zero3-offload": {
        "parallel.data": 2,
        "deepspeed.zero_optimization.stage": 3,
        "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
        "deepspeed.zero_optimization.offload_param.device": "cpu",
    },
}


def late(fill: Any) -> Any:
    """A copy that begins when the step has long reached its update."""

    def fill_late(staging: Staging) -> None:
        time.sleep(0.15)
        fill(staging)

    return fill_late


def save_after_every_step(folder: str, changes: dict[str, Any], into: str) -> list[tuple[int, float, int]]:
    """Step, stall and staging of every checkpoint that was published."""
    trainer, _ = tiny_trainer(Path(folder), changes)
    saver, saved = RunSaver(trainer, Path(into)), []
    with trainer.batches, mock.patch.object(Staging, "fill", late(Staging.fill)):
        for _ in range(STEPS):
            saver.stepped(trainer.train_step(before_update=saver.before_update))
            saved += saver.save(at_once=False)
        saved += saver.finish()
    return [(each.step, each.stall_seconds, each.staging_bytes) for each in saved]


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_is_that_of_a_run_that_waits(ranks, tmp_path, case):
    write_token_files(tmp_path)
    changes = {"training.precision": "fp32", **CASES[case]}

    def run(name: str, **more: Any) -> list[tuple[int, float, int]]:
        arguments = {"folder": str(tmp_path), "changes": {**changes, **more}, "into": str(tmp_path / name)}
        first, *_ = ranks.run(save_after_every_step, world_size=ranks_of(changes), **arguments)
        return first

    beside, waiting = run("beside"), run("waiting", **{"checkpoint.async_save": "false"})
    assert [step for step, *_ in beside] == [step for step, *_ in waiting] == list(range(1, STEPS + 1))
    assert all(staging > 0 for *_, staging in beside) and all(staging == 0 for *_, staging in waiting)
    for step in range(1, STEPS + 1):
        ours, theirs = (read_manifest(tmp_path / name / f"step-{step:06d}") for name in ("beside", "waiting"))
        assert (ours.tensors, ours.files, ours.optimizer) == (theirs.tensors, theirs.files, theirs.optimizer)
    assert find_latest(tmp_path / "beside") == tmp_path / "beside" / f"step-{STEPS:06d}"


def test_without_memory_for_copies_a_run_waits(ranks, tmp_path):
    write_token_files(tmp_path)
    saved = ranks.run(save_without_memory, folder=str(tmp_path), into=str(tmp_path / "checkpoints"))
    assert [(step, staging) for step, _, staging in saved[0]] == [(step, 0) for step in range(1, STEPS + 1)]


def save_without_memory(folder: str, into: str) -> list[tuple[int, float, int]]:
    with mock.patch("megalite.train.checkpoints.saving.available_memory_bytes", lambda: 1000):
        return save_after_every_step(folder, {}, into)


def expected_seconds(folder: str, into: str) -> list[float]:
    """Return the expectations before the first save, while a slow one is in flight, and after it; and its seconds."""
    trainer, _ = tiny_trainer(Path(folder), {})
    saver = RunSaver(trainer, Path(into))
    found = [saver.expected_seconds(another=False), saver.expected_seconds(another=True)]
    with trainer.batches, mock.patch.object(Staging, "fill", late(Staging.fill)):
        saver.stepped(trainer.train_step(before_update=saver.before_update))
        saver.save(at_once=False)
        in_flight = saver.expected_seconds(another=False)
        [published] = saver.finish()
        found += [in_flight, saver.expected_seconds(another=False), published.write_seconds]
    return found


def test_the_last_save_is_expected_to_take_as_long_as_a_recent_one(ranks, tmp_path):
    """A time budget counts on it; before the first save it goes by the size."""
    write_token_files(tmp_path)
    [found] = ranks.run(expected_seconds, folder=str(tmp_path), into=str(tmp_path / "checkpoints"))
    estimated, twice, in_flight, after, written = found
    assert 0 < estimated < 0.1 and twice == in_flight == 2 * estimated
    assert after == written > 0.15
