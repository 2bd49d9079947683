"""Between two prints a step has one collective for which the host waits, beside those of tensors of the model."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.launcher.rank.detect import RankInfo
from megalite.train.callbacks import Callback
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.loop import StopConditions, TrainingLoop
from megalite.train.report import RunReporter
from megalite.train.time_budget import TimeBudget
from tests.support.selection import cases
from tests.support.tiny_run import ranks_of, tiny_trainer, write_token_files

# The model's tensors are float32; only what hosts tell each other is float64 (numbers) or bytes (objects).
MODEL = torch.float32
STEPS = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "data 2": {"parallel.data": 2},
    "tensor 2": {"parallel.tensor": 2, "parallel.sequence": "true"},
    "pipeline 2": {"parallel.pipeline": 2},
    "pipeline 2 x data 2, zbv": {"parallel.pipeline": 2, "parallel.data": 2, "parallel.schedule": "zbv"},
    "ZeRO 1": {"parallel.data": 2, "deepspeed.zero_optimization.stage": 1},
}


class HostCollectives(TorchDispatchMode):
    """Notes the collectives on tensors that are not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            if any(each.dtype != MODEL for each in tensors):
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class NoSignals:
    def __call__(self) -> None:
        return None

    def first_step_over(self) -> None:
        pass


def collectives_of_steps(
    folder: Path, changes: dict[str, Any], callbacks: tuple[Callback, ...]
) -> list[list[str]]:
    """Return the collectives of the hosts in each step of a run, from its batch to the next step's."""
    trainer, _ = tiny_trainer(folder, changes)
    mesh, counted = trainer.mesh, HostCollectives()
    world = mesh.layout.world_size
    info = RankInfo(mesh.rank, world, mesh.rank, world, "", 0, "megalite", "here")
    reporter = RunReporter(trainer, info, folder / "metrics.jsonl")
    ends: list[int] = []
    step = trainer.train_step

    def marked(*arguments: Any) -> Any:
        ends.append(len(counted.found))
        return step(*arguments)

    trainer.train_step = marked  # type: ignore[method-assign]
    stops = StopConditions(cast(Any, NoSignals()), TimeBudget())
    saver = RunSaver(trainer, folder / "checkpoints")
    with trainer.batches, counted:
        TrainingLoop(trainer, {}, reporter, saver, callbacks=callbacks, stops=stops).run()
    return [counted.found[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize("name", cases(LAYOUTS, core=("data 2", "pipeline 2 x data 2, zbv")))
def test_the_host_waits_for_one_collective_a_step(ranks, tmp_path, name):
    write_token_files(tmp_path)
    changes = {
        "training.precision": "fp32",
        "training.steps": STEPS,
        "monitor.every": 100,
        "monitor.peak_tflops": 1,
        **LAYOUTS[name],
    }
    world = ranks_of(changes)
    for first, *others in ranks.run(
        collectives_of_steps, world, folder=tmp_path, changes=changes, callbacks=()
    ):
        # The first step counts its own tokens and measures the memory.
        assert len(first) > 1 or world == 1
        # DeepSpeed's own, for its norm, are of the model's type.
        for step in others:
            assert len(step) == (0 if world == 1 else 1), step


@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_the_norms_of_each_layer_cost_one_more(ranks, tmp_path, zero_stage):
    write_token_files(tmp_path)
    changes = {
        "training.precision": "fp32",
        "training.steps": 5,
        "monitor.every": 100,
        "parallel.data": 2,
        "monitor.layers_every": 2,
        **({"deepspeed.zero_optimization.stage": zero_stage} if zero_stage else {}),
    }
    for _, *others in ranks.run(collectives_of_steps, 2, folder=tmp_path, changes=changes, callbacks=()):
        assert [len(step) for step in others] == [2, 1, 2]


def test_a_callback_costs_one_more(ranks, tmp_path):
    write_token_files(tmp_path)
    changes = {"training.precision": "fp32", "training.steps": 3, "monitor.every": 100, "parallel.data": 2}
    for _, *others in ranks.run(
        collectives_of_steps, 2, folder=tmp_path, changes=changes, callbacks=(Callback(),)
    ):
        assert [len(step) for step in others] == [2]
