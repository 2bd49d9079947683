"""How ranks are started from a process that has used torch: forked, spawned, or not at all."""

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.errors import LaunchError
from megalite.launcher.process import children
from megalite.train import run
from megalite.train.callbacks import Callback
from megalite.train.run import Trainer


def trainer_of(ranks: int, *callbacks: Callback) -> Trainer:
    config: Any = SimpleNamespace(layout=SimpleNamespace(world_size=ranks))
    return Trainer(config, callbacks=callbacks)


@pytest.mark.parametrize(("poisoned", "method"), [(False, "fork"), (True, "spawn")])
def test_a_process_that_asked_for_a_gpu_spawns_its_ranks(poisoned: bool, method: str) -> None:
    parent = os.getpid()
    # As torch.cuda answers in a child of a process that called is_available().
    module = SimpleNamespace(_is_in_bad_fork=lambda: poisoned and os.getpid() != parent)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
        mock.patch.object(torch, "get_device_module", lambda device: module),
    ):
        assert trainer_of(2)._start_method(1) == method


def test_a_device_that_cannot_be_asked_after_a_fork_has_its_ranks_spawned() -> None:
    parent = os.getpid()

    def ask() -> bool:
        assert os.getpid() == parent, "the driver is gone"
        return False

    with (
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
        mock.patch.object(torch, "get_device_module", lambda device: SimpleNamespace(_is_in_bad_fork=ask)),
    ):
        assert trainer_of(2)._start_method(1) == "spawn"
    assert os.getpid() == parent


def test_an_interrupt_meanwhile_leaves_no_process() -> None:
    parent, before = os.getpid(), children()

    def hang() -> None:
        if os.getpid() != parent:
            signal.pause()

    with (
        mock.patch.object(torch.accelerator, "current_accelerator", hang),
        mock.patch.object(run.select, "select", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        trainer_of(2)._start_method(1)
    assert children() == before


class Unsendable(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_callbacks_that_a_new_process_cannot_have_are_refused() -> None:
    with mock.patch.object(run, "_computes_after_fork", lambda threads: False):
        assert trainer_of(2, Callback())._start_method(1) == "spawn"
        with pytest.raises(
            LaunchError, match=r"callback Unsendable cannot be sent.*torchrun --nproc-per-node 2"
        ):
            trainer_of(2, Unsendable())._start_method(1)
        with pytest.raises(
            LaunchError, match=r"launch\.restarts asks for .*Unsendable.*; set launch\.restarts = 0"
        ):
            trainer_of(1, Unsendable())._start_method(1)


def test_a_rank_that_meets_the_call_while_it_imports_the_script_says_so() -> None:
    process = multiprocessing.current_process()
    with (
        mock.patch.object(process, "_inheriting", True, create=True),
        pytest.raises(LaunchError, match=r'put the call under if __name__ == "__main__":'),
    ):
        trainer_of(2).run("the configuration")
