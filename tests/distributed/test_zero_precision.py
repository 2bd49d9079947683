"""16-bit training under ZeRO: its masters and its norm are those of the torch path, whose gradients are summed and
averaged in float32; the loss scale of fp16 goes its way, in a pipeline too."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.sections.schema import OptimizerConfig
from megalite.data.batches.loader import StepLoader
from megalite.errors import TrainingError
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import MASTER, WEIGHT
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.optimizer.protocol import Update
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep
from tests.support.checkpoints import save_checkpoint
from tests.support.matrix.axes import Settings
from tests.support.matrix.rows import config_of, settings_of
from tests.support.matrix.train import TinyLoader
from tests.support.options import changed
from tests.support.parity import ZERO_NARROW_LOSS, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import SGD, Job, Parts, build, fp16_allowed, local_batch, whole_weights

SHAPE = tiny_shape(tied=True)
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))


@dataclass
class Curve:
    """The results of one rank. masters: after the first step, by name: the start of each flat range, and its values."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, tuple[int, Tensor]]


def train(job: Job) -> Curve:
    with fp16_allowed():
        parts = build(job)
        result = Curve([], [], {})
        for step in range(job.steps):
            batch = local_batch(job, parts.mesh, step)
            result.losses.append(parts.accumulate(batch))
            result.norms.append(parts.update(job.learning_rate).grad_norm)
            if step == 0:
                result.masters = masters(parts)
        return result


def masters(parts: Parts) -> dict[str, tuple[int, Tensor]]:
    return {
        shard.parameter.name: (shard.start, shard.values.clone())
        for shard in parts.optimizer.state.shards()
        if shard.key == MASTER
    }


def joined(job: Job, results: list[Curve]) -> dict[str, Tensor]:
    """The flattened masters of every (pp, tp) by name, from the runs of its data-parallel ranks."""
    whole: dict[str, Tensor] = {}
    for ranks in job.layout.groups("dp"):
        at = job.layout.coordinates(ranks[0])
        for name in {name for rank in ranks for name in results[rank].masters}:
            runs = [results[rank].masters[name] for rank in ranks if name in results[rank].masters]
            runs = runs if job.zero_stage else runs[:1]
            ordered = sorted(runs, key=lambda run: run[0])
            ends = [start + values.numel() for start, values in ordered]
            assert [start for start, _ in ordered] == [0, *ends[:-1]], "runs overlap or leave a gap"
            whole[f"{name} of pp {at.pp} tp {at.tp}"] = torch.cat([values for _, values in ordered])
    return whole


JOBS = [
    (1, Layout(data=2), "none"),
    (1, Layout(2, 2, 1), "none"),
    (1, Layout(2, 2, 1), "optimizer"),
    (2, Layout(data=2), "none"),
    (2, Layout(data=2), "optimizer"),
    (3, Layout(data=2, tensor=2), "none"),
    (3, Layout(data=2), "optimizer"),
    (3, Layout(data=2), "parameters"),
]


@pytest.mark.parametrize(
    "dtype", cases([torch.bfloat16, torch.float16], core=[torch.bfloat16]), ids=["bf16", "fp16"]
)
@pytest.mark.parametrize(("stage", "layout", "offload"), cases(JOBS, core=[JOBS[0], JOBS[-1]]))
def test_the_masters_are_those_of_the_torch_path(ranks, stage, layout, offload, dtype):
    precision = "fp16" if dtype == torch.float16 else "bf16"
    job = Job(SHAPE, layout, optimizer=changed(SGD, precision=precision), dtype=dtype, steps=5)
    ours = ranks.run(train, world_size=layout.world_size, job=job)
    job = replace(job, zero_stage=stage, offload=offload)
    theirs = ranks.run(train, world_size=layout.world_size, job=job)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(other.norms[0], one.norms[0], rtol=ZERO_RTOL, what="norm")
        assert max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)) < ZERO_NARROW_LOSS
    expected = joined(replace(job, zero_stage=0), ours)
    assert_same_tensors(joined(job, theirs), expected, rtol=ZERO_RTOL)


# ---------------------------------------------------------------------------------------------------------- overflows

OVERFLOWING = "model.layers.2.self_attn.o_proj.weight"
SMALL_WINDOW = changed(SGD, precision="fp16", initial_loss_scale_power=6, loss_scale_window=3)


@dataclass
class Overflow:
    """The results of one rank in each step; `error`: the exception of the step."""

    updates: list[Update]
    scales: list[float]
    unchanged: list[bool]
    error: str = ""


def train_with_overflow(job: Job) -> Overflow:
    """The second step has a gradient with an inf on one rank."""
    result = Overflow([], [], [])
    with fp16_allowed():
        parts = build(job)
        for step in range(job.steps):
            before = held(job, parts)
            with overflow(parts) if step == 1 else nullcontext():
                parts.accumulate(local_batch(job, parts.mesh, step))
            result.scales.append(parts.optimizer.loss_scale)
            try:
                result.updates.append(parts.update(job.learning_rate))
            except TrainingError as error:
                result.error = str(error)
            result.unchanged.append(all(map(torch.equal, before, held(job, parts))))
            if result.error:
                break
    return result


@contextmanager
def overflow(parts: Parts) -> Iterator[None]:
    """A hook on the gradient itself, since ZeRO 2 and 3 take it away before anyone could reach it."""
    tensor = parts.replica.tensors.get(OVERFLOWING)
    if tensor is None or (parts.mesh.tp.rank, parts.mesh.batch.rank) != (parts.mesh.tp.size - 1, 0):
        yield
        return

    def of_the_first_micro_batch(gradient: Tensor) -> Tensor:
        hook.remove()
        return torch.full_like(gradient, torch.inf)

    hook = tensor.register_hook(of_the_first_micro_batch)
    yield
    hook.remove()


def held(job: Job, parts: Parts) -> list[Tensor]:
    states = [shard.values.clone() for shard in parts.optimizer.state.shards()]
    with whole_weights(job.zero_stage, parts.replica.tensors):
        return states + [tensor.detach().clone() for tensor in parts.stage.parameters()]


ENGINES = [
    (1, Layout(2, 2, 1), "none"),
    (1, Layout(data=2), "optimizer"),
    (2, Layout(data=2), "none"),
    (3, Layout(data=2, tensor=2), "optimizer"),
]


@pytest.mark.parametrize(("stage", "layout", "offload"), cases(ENGINES, core=ENGINES[:1]))
def test_an_fp16_overflow_is_left_out_on_every_rank(ranks, stage, layout, offload):
    job = Job(
        SHAPE, layout, optimizer=SMALL_WINDOW, dtype=torch.float16, zero_stage=stage, offload=offload, steps=6
    )
    for result in ranks.run(train_with_overflow, world_size=layout.world_size, job=job):
        assert [update.skipped for update in result.updates] == [False, True, False, False, False, False]
        assert result.updates[1].overflow == f"{OVERFLOWING} (layer 2)"
        assert result.unchanged == [False, True, False, False, False, False]
        assert result.scales == [64, 64, 32, 32, 32, 64], "as without ZeRO"


@pytest.mark.parametrize(("stage", "layout", "offload"), cases(ENGINES, core=ENGINES[:1]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_not_finite_without_a_scale_ends_the_run_and_changes_nothing(
    ranks, stage, layout, offload, dtype
):
    job = Job(SHAPE, layout, dtype=dtype, zero_stage=stage, offload=offload, steps=2)
    for result in ranks.run(train_with_overflow, world_size=layout.world_size, job=job):
        assert result.error.startswith(f"the gradient is not finite, first in {OVERFLOWING} (layer 2)")
        assert result.unchanged == [False, True]


def test_an_overflow_at_the_smallest_scale_ends_the_run(ranks):
    smallest = changed(SGD, precision="fp16", initial_loss_scale_power=0)
    job = Job(SHAPE, Layout(pipeline=2), optimizer=smallest, dtype=torch.float16, zero_stage=1, steps=2)
    for result in ranks.run(train_with_overflow, world_size=2, job=job):
        assert OVERFLOWING in result.error and "smallest loss scale, 1:" in result.error
        assert result.unchanged == [False, True]


# -------------------------------------------------------------------------------------------------------- checkpoints


def train_and_save(job: Job, folder: str) -> list[float]:
    """Go on from the folder's latest checkpoint, if any, up to step `job.steps`, then save."""
    latest = find_latest(Path(folder))
    with fp16_allowed():
        parts = build(replace(job, seed=99) if latest else job)
        first = load_checkpoint(latest, parts.replica, parts.optimizer.state).step if latest else 0
        losses = []
        for step in range(first, job.steps):
            losses.append(parts.accumulate(local_batch(job, parts.mesh, step)))
            parts.update(job.learning_rate)
        counters = {"step": job.steps, "samples": 8 * job.steps, "tokens": 96 * job.steps}
        save_checkpoint(Path(folder), parts.replica, parts.optimizer.state, trainer_state=counters, config={})
        return losses


def contents(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of every kind, whole."""
    with CheckpointReader(checkpoint) as reader:
        return {
            f"{kind} {name}": reader.read(kind, name, TensorSlice((0,) * len(entry.shape), entry.shape))
            for kind, entries in reader.manifest.tensors.items()
            for name, entry in entries.items()
        }


@pytest.mark.parametrize(
    ("stage", "layout", "offload", "dtype"),
    [
        (1, Layout(2, 2, 1), "none", torch.bfloat16),
        pytest.param(2, Layout(data=3), "optimizer", torch.bfloat16, marks=pytest.mark.extended),
        pytest.param(3, Layout(data=3), "parameters", torch.float16, marks=pytest.mark.extended),
    ],
    ids=["bf16 zero1 pp2", "bf16 zero2 offload", "fp16 zero3 offload"],
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(ranks, tmp_path, stage, layout, offload, dtype):
    settings = changed(ADAMW, precision="fp16" if dtype == torch.float16 else "bf16", loss_scale_window=3)
    job = Job(
        SHAPE, layout, optimizer=settings, dtype=dtype, zero_stage=stage, offload=offload, learning_rate=1e-3
    )

    def run(name: str, steps: int) -> list[list[float]]:
        folder = str(tmp_path / name)
        return ranks.run(
            train_and_save, world_size=layout.world_size, job=replace(job, steps=steps), folder=folder
        )

    whole = run("whole", 4)
    run("parts", 2)
    assert run("parts", 4) == [losses[2:] for losses in whole]
    first, second = (read_manifest(tmp_path / name / "step-000004") for name in ("whole", "parts"))
    assert (first.tensors, first.optimizer) == (second.tensors, second.optimizer)
    assert MASTER in first.tensors


def train_from_settings(settings: Settings, folder: str, stop: int) -> list[StepReport]:
    """As `megalite train` does: up to step `stop`, from the folder's latest checkpoint on."""
    config = config_of(settings)
    mesh = ParallelMesh.over_world(config.layout)
    assert config.model.vocab_size != "auto"
    shape = config.model.shape(config.model.vocab_size)
    with fp16_allowed():
        trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
        if (latest := find_latest(Path(folder))) is not None:
            trainer.resume(latest)
        reports = [trainer.train_step() for _ in range(trainer.state.step, stop)]
        RunSaver(trainer, Path(folder)).save(at_once=True)
        return reports


@pytest.mark.extended
def test_an_fp16_run_file_trains_in_a_pipeline_under_zero(ranks, tmp_path):
    """The first steps overflow; a resumed run goes on with the scale and the count of skipped steps."""
    row = {"layout": "tp1-pp2-dp2", "precision": "fp16", "zero": "1", "micro_batches": "2"}
    settings = {
        **settings_of(
            {**row, "micro_batch_size": "1", "chunks": "1", "layers": "balanced", "vocabulary": "101"}
        ),
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 1e-3,
        "training.steps": 8,
        "training.initial_loss_scale_power": 24,
        "training.loss_scale_window": 3,
    }

    def run(name: str, stop: int, **changes: object) -> list[list[tuple[object, ...]]]:
        results = ranks.run(
            train_from_settings,
            world_size=4,
            settings={**settings, **changes},
            folder=str(tmp_path / name),
            stop=stop,
        )
        return [[(r.loss, r.loss_scale, r.skipped_steps, r.overflow) for r in result] for result in results]

    whole = run("whole", 8)
    assert all(result == whole[0] for result in whole)
    _, scales, skipped, overflows = zip(*whole[0], strict=True)
    assert scales[0] == 2.0**24 and 0 < skipped[-1] < 8
    assert str(overflows[0]).endswith(".weight") and overflows[-1] is None
    run("parts", skipped[-1] + 1)
    assert run("parts", 8) == [result[skipped[-1] + 1 :] for result in whole]
    plain = run("plain", 8, **{"deepspeed.zero_optimization.stage": 0})
    assert [each[1:3] for each in plain[0]] == [each[1:3] for each in whole[0]], "as without ZeRO"


@pytest.mark.extended
def test_a_run_changes_stage_layout_and_precision_without_losing_a_digit(ranks, tmp_path):
    """Each loads what the one before has saved, trains nothing, and saves."""
    first = Job(SHAPE, Layout(data=3), optimizer=ADAMW, dtype=torch.bfloat16, zero_stage=3, steps=2)
    others = [
        replace(first, layout=Layout(2, 1, 2), zero_stage=0),
        replace(first, layout=Layout(2, 2, 1), zero_stage=1),
        replace(first, layout=Layout(data=2), zero_stage=3, offload="parameters", dtype=torch.float32),
        replace(first, layout=Layout(data=2, tensor=2), zero_stage=2, dtype=torch.float16),
        replace(first, layout=Layout(tensor=2), zero_stage=3),
    ]
    ranks.run(train_and_save, world_size=3, job=first, folder=str(tmp_path / "0"))
    expected = contents(find_latest(tmp_path / "0"))
    weights = {name: values for name, values in expected.items() if name.startswith(f"{WEIGHT} ")}
    for place, job in enumerate(others, start=1):
        shutil.copytree(tmp_path / str(place - 1), tmp_path / str(place))
        ranks.run(
            train_and_save, world_size=job.layout.world_size, job=job, folder=str(tmp_path / str(place))
        )
        found = contents(find_latest(tmp_path / str(place)))
        for name in weights:
            exact = expected[name.replace(WEIGHT, MASTER, 1)]
            master = found.get(name.replace(WEIGHT, MASTER, 1), found[name])
            assert torch.equal(master, exact) and torch.equal(found[name], exact.to(job.dtype)), (place, name)
        rest = [name for name in expected if not name.startswith((f"{WEIGHT} ", f"{MASTER} "))]
        assert rest and all(torch.equal(found[name], expected[name]) for name in rest)
