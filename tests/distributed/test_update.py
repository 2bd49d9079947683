"""Groups of parameters, clipping by value and the average of weights are the same in every layout and under ZeRO."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.axes import Layout
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.parameters import canonical_tensors
from megalite.topology.state import EMA
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.checkpoints import save_checkpoint
from tests.support.options import changed
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL, assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, build, local_batch

SHAPE = tiny_shape(tied=True)
GROUPS = (
    ParameterGroup("*.0.*_proj.*", 0.25),
    ParameterGroup("*norm*", 2.0, 0.2),
    ParameterGroup("model.embed_tokens.weight", 0.0),
)
# DeepSpeed wants every group on every stage.
GROUPS_OF_ALL_STAGES = (ParameterGroup("*_proj.*", 0.25), ParameterGroup("*norm*", 2.0, 0.2))
SGD = OptimizerConfig(name="sgd", momentum=0.9, gradient_clipping=0.5, ema_decay=0.5)
SETTINGS = OptimizerSettings(SGD, groups=GROUPS)


def train_and_save(job: Job, folder: str, steps: int) -> None:
    """Go on from the folder's latest checkpoint, if any."""
    parts = build(job)
    latest = find_latest(Path(folder))
    first = load_checkpoint(latest, parts.replica, parts.optimizer.state).step if latest else 0
    for step in range(first, steps):
        parts.accumulate(local_batch(job, parts.mesh, step))
        parts.update(job.learning_rate)
    counters = {"step": steps, "samples": 8 * steps, "tokens": 96 * steps}
    save_checkpoint(Path(folder), parts.replica, parts.optimizer.state, trainer_state=counters, config={})


def tensors_of(folder: Path, kind: str, step: int = 4) -> dict[str, Tensor]:
    with CheckpointReader(folder / f"step-{step:06d}") as reader:
        shapes = canonical_tensors(SHAPE)
        return {name: reader.read(kind, name, full_slice(size)) for name, size in shapes.items()}


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """The folder of a job after four steps, run once for each job."""

    def run(job: Job) -> Path:
        folder = tmp_path_factory.mktemp("run")
        ranks.run(train_and_save, world_size=job.layout.world_size, job=job, folder=str(folder), steps=4)
        return folder

    return cache(run)


def assert_same(one: Path, other: Path, *, rtol: float) -> None:
    for kind in (WEIGHT, EMA):
        found, expected = (
            {name: tensor.double() for name, tensor in tensors_of(folder, kind).items()}
            for folder in (one, other)
        )
        assert_same_tensors(found, expected, rtol=rtol)


@pytest.mark.parametrize(
    ("layout", "zero_stage"),
    [(Layout(2, 2, 2), 0), (Layout(2, 2, 2), 1), (Layout(data=4), 1), (Layout(data=2, tensor=2), 2)],
    ids=str,
)
def test_groups_and_averages_do_not_depend_on_the_layout(trained, layout, zero_stage):
    groups = GROUPS_OF_ALL_STAGES if zero_stage and layout.pipeline > 1 else GROUPS
    alone = Job(SHAPE, optimizer=changed(SETTINGS, groups=groups))
    job = replace(alone, layout=layout, zero_stage=zero_stage)
    assert_same(trained(job), trained(alone), rtol=ZERO_RTOL if zero_stage else LAYOUT_RTOL)


def test_groups_and_averages_do_something(trained):
    folder = trained(Job(SHAPE, optimizer=SETTINGS))
    plain = trained(Job(SHAPE, optimizer=changed(SETTINGS, groups=(), ema_decay=0.0)))
    weights, averages, others = tensors_of(folder, WEIGHT), tensors_of(folder, EMA), tensors_of(plain, WEIGHT)
    frozen = "model.embed_tokens.weight"
    assert torch.equal(weights[frozen], averages[frozen])
    for name in weights.keys() - {frozen}:
        assert not torch.equal(weights[name], averages[name]), name
        assert not torch.equal(weights[name], others[name]), name


@pytest.mark.parametrize("clipping", cases([0.0, 0.05], core=[0.05]), ids=["by value", "by value and norm"])
def test_clipping_by_value_does_not_depend_on_the_layout(trained, clipping):
    alone = Job(SHAPE, optimizer=changed(SETTINGS, clip_value=1e-3, gradient_clipping=clipping))
    job = replace(alone, layout=Layout(2, 2, 2))
    assert_same(trained(job), trained(alone), rtol=LAYOUT_RTOL)


def test_an_average_starts_from_the_weights_and_may_be_dropped(ranks, tmp_path):
    plain = Job(SHAPE, optimizer=changed(SETTINGS, ema_decay=0.0))
    # A decay of almost one: the average stays what it started from.
    averaging = replace(plain, optimizer=changed(SETTINGS, ema_decay=1 - 1e-12), layout=Layout(tensor=2))
    for job, steps in ((plain, 2), (averaging, 4), (plain, 5)):
        ranks.run(
            train_and_save, world_size=job.layout.world_size, job=job, folder=str(tmp_path), steps=steps
        )
    started, average = tensors_of(tmp_path, WEIGHT, 2), tensors_of(tmp_path, EMA, 4)
    assert_same_tensors(average, started)
    with CheckpointReader(tmp_path / "step-000005") as reader:
        assert EMA not in reader.manifest.tensors
