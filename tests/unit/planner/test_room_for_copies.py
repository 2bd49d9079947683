"""The room for copies in memory, before a run starts: as many bytes as a start of the run writes there."""

import os
from types import SimpleNamespace

import pytest

from megalite.config.load import load_run
from megalite.planner import memory_copies
from megalite.planner.memory_copies import copy_line, copy_problems

SETTINGS = {
    "model.preset": "tiny",
    "model.vocab_size": 300,
    "data.source": "stdlib",
    "training.steps": 4,
    "training.precision": "fp32",
    "parallel.data": 4,
    "training.sequence_length": 16,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 8,
    "checkpoint.in_memory_every": 5,
}


def config(**changes: object):
    return load_run(None, [f"--{name}={value}" for name, value in {**SETTINGS, **changes}.items()]).config


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 12),  # weight and two moments
        ({"training.precision": "bf16"}, 14),  # and a master
        ({"deepspeed.zero_optimization.stage": 1}, 16),  # ZeRO has a master of an fp32 weight too
        ({"optimizer.ema_decay": 0.9}, 16),
        ({"optimizer.name": "sgd"}, 8),
    ],
)
def test_the_bytes_of_two_copies(changes, size):
    line = copy_line(config(**changes))
    assert f"* {size} bytes, in /dev/shm of all hosts together" in line
    assert "= 2 * " in line


def test_a_host_needs_its_share_and_that_of_the_host_before_it(monkeypatch):
    values = int(copy_line(config()).split(" * ")[1].split()[0].replace(",", ""))
    both = 2 * values * 12

    def free(room: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=room, f_frsize=1))

    for ranks, needed in ((4, both), (2, both), (1, both // 2)):
        free(needed)
        assert not list(copy_problems(config(), ranks))
        free(needed - 1)
        [problem] = copy_problems(config(), ranks)
        assert problem.key == "checkpoint.in_memory_every" and "docker --shm-size" in str(problem)
        assert not list(copy_problems(config(), ranks, 1))
    assert not list(copy_problems(config(**{"checkpoint.in_memory_every": 0}), 4))


def test_a_host_without_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_copies, "SHARED_MEMORY", tmp_path / "absent")
    [problem] = copy_problems(config(), 4)
    assert "absent, which cannot be written" in str(problem)
