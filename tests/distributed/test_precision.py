"""bf16 and fp16 train as float32 does, in every layout; an fp16 overflow is left out on all ranks; faults are seen."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.config.sections.schema import OptimizerConfig
from megalite.config.sections.training_section import PrecisionSettings
from megalite.errors import TrainingError
from megalite.parallel import gradients
from megalite.topology.axes import Layout
from megalite.topology.state import MASTER
from megalite.train.optimizer import torch as torch_path
from megalite.train.optimizer.loss_scale import LossScale
from megalite.train.optimizer.protocol import Update
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.checkpoints import save_checkpoint
from tests.support.options import changed
from tests.support.parity import BF16_RTOL, NARROW_LOSS, narrow_bound, relative_error
from tests.support.tiny import tiny_shape
from tests.support.training import Job, Parts, Shard, build, full_tensors, local_batch, shards_of

SHAPE = tiny_shape(tied=True)
# A fixed batch and a high rate, so that the loss falls far: SGD, since Adam forgives a wrong scale, and clipping.
SGD = OptimizerSettings(OptimizerConfig(name="sgd", momentum=0.9, gradient_clipping=0.5))
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw"))
FP16 = LossScale(PrecisionSettings(precision="fp16"))
STEPS = 20


def job_of(dtype: torch.dtype, settings: OptimizerSettings = ADAMW, **changes: Any) -> Job:
    rate = 1e-1 if settings.optimizer.name == "sgd" else 3e-3
    settings = changed(settings, precision="fp16" if dtype == torch.float16 else settings.training.precision)
    return Job(SHAPE, optimizer=settings, dtype=dtype, learning_rate=rate, micro_batch_size=4, **changes)


# ---------------------------------------------------------------------------------------------------- planted faults


def _forget_the_scale(scale_gradients: Callable[..., None]) -> Callable[..., None]:
    return lambda gradients, factor: None


def _clip_before_unscaling(clip_gradients: Callable[..., None]) -> Callable[..., None]:
    return lambda gradients, *, norm, max_norm: clip_gradients(
        gradients, norm=norm * FP16.value, max_norm=max_norm
    )


def _finite_on_rank_0(_: Any) -> SimpleNamespace:
    return SimpleNamespace(sqrt=math.sqrt, isfinite=lambda norm: dist.get_rank() == 0)


FAULTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "grads accumulated in bf16": {"accumulate_in_float32": lambda _: lambda tensors: None},
    "loss scale not divided out": {"scale_gradients": _forget_the_scale},
    "clip before unscale": {"clip_gradients": _clip_before_unscaling},
    "master not updated from": {"_copy_masters": lambda _: lambda masters, tensors: None},
    "skipped step on one rank only": {
        "math": _finite_on_rank_0,
        "first_nonfinite": lambda _: lambda parameters, tensors, mesh: "a tensor",
    },
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    faults = FAULTS[fault] if fault else {}
    replaced = {name: replace_(getattr(torch_path, name)) for name, replace_ in faults.items()}
    with mock.patch.multiple(torch_path, **replaced) if replaced else nullcontext():
        yield


# ------------------------------------------------------------------------------------------------------------ curves


@dataclass
class Curve:
    losses: list[float]
    norms: list[float]
    final: list[Shard]


def curve(job: Job, *, steps: int = STEPS, fault: str | None = None) -> Curve:
    """Train on one batch again and again."""
    with planted(fault):
        parts = build(job)
        batch = local_batch(job, parts.mesh, 0)
        result = Curve([], [], [])
        for _ in range(steps):
            result.losses.append(parts.accumulate(batch))
            result.norms.append(parts.update(job.learning_rate).grad_norm)
        result.final = shards_of(parts.replica.parameters, parts.replica.tensors, parts.mesh)
        return result


def worst_loss(one: Curve, other: Curve) -> float:
    """nan where a loss is."""
    return (torch.tensor(one.losses) - torch.tensor(other.losses)).abs().max().item()


@pytest.fixture(scope="module")
def alone(ranks):
    """One process's curve, computed once for each job."""
    return cache(lambda job: ranks.run(curve, world_size=1, job=job)[0])


@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bits_train_as_float32_does(alone, settings, dtype):
    wide, narrow = (alone(job_of(each, settings)) for each in (torch.float32, dtype))
    assert wide.losses[-1] < wide.losses[0] - 0.5, "the loss must fall far to compare anything"
    assert sum(norm > settings.optimizer.gradient_clipping for norm in wide.norms) >= STEPS // 2, (
        "clipping is active"
    )
    assert worst_loss(narrow, wide) < NARROW_LOSS


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        ("loss scale not divided out", torch.float16),
        ("clip before unscale", torch.float16),
        ("master not updated from", torch.bfloat16),
    ],
)
def test_a_planted_fault_departs_from_float32(ranks, alone, fault, dtype):
    [faulty] = ranks.run(curve, world_size=1, job=job_of(dtype, SGD), steps=5, fault=fault)
    wide = alone(job_of(torch.float32, SGD))
    assert not worst_loss(faulty, replace(wide, losses=wide.losses[:5])) < NARROW_LOSS


def test_steps_smaller_than_the_weights_digits_add_up_in_the_masters(alone):
    settings = changed(ADAMW, weight_decay=0.0)
    wide, narrow = (
        alone(replace(job_of(dtype, settings), learning_rate=5e-4))
        for dtype in (torch.float32, torch.bfloat16)
    )
    # 5e-4 is an eighth of the distance between bfloat16 numbers around 1, where the norms' weights are.
    wide_norms, narrow_norms = (
        torch.cat([shard.values.double() for shard in result.final if "norm" in shard.name])
        for result in (wide, narrow)
    )
    assert (narrow_norms != 1).double().mean() > 0.5
    assert relative_error(narrow_norms, wide_norms) < BF16_RTOL


# ----------------------------------------------------------------------------------------------- layouts and gradients


def first_gradients(
    job: Job, *, rounded: bool = False, batches: int = 1, fault: str | None = None
) -> list[Shard]:
    """This rank's shards of the gradient of so many batches, summed over dp, at bfloat16's initial weights."""
    with planted(fault):
        parts = build(job)
        tensors = parts.replica.tensors
        if rounded:
            with torch.no_grad():
                for tensor in tensors.values():
                    tensor.copy_(tensor.bfloat16())
        for step in range(batches):
            parts.forward_backward(local_batch(job, parts.mesh, step))
        parts.optimizer.reduce_gradients()
        return shards_of(
            parts.replica.parameters,
            {name: tensor.grad.double() for name, tensor in tensors.items()},
            parts.mesh,
        )


def gradient_errors(shards: list[Shard], reference: list[Shard]) -> dict[str, float]:
    narrow, exact = (full_tensors(SHAPE, each, add=False) for each in (_once(shards), reference))
    return {name: relative_error(narrow[name], exact[name]) for name in exact}


def _once(shards: list[Shard]) -> list[Shard]:
    """One of the shards that several ranks hold: copies differ in the last digit after a reduction."""
    return list({(shard.name, shard.region): shard for shard in shards}.values())


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 4, 1), Layout(2, 2, 2)], ids=str
)
def test_a_layout_in_bf16_errs_as_one_process_in_bf16_does(ranks, layout):
    exact = ranks.run(first_gradients, world_size=1, job=job_of(torch.float64), rounded=True)[0]
    single = gradient_errors(ranks.run(first_gradients, world_size=1, job=job_of(torch.bfloat16))[0], exact)
    job = job_of(torch.bfloat16, layout=layout)
    job = replace(job, micro_batch_size=1)
    held = ranks.run(first_gradients, world_size=layout.world_size, job=job)
    errors = gradient_errors([shard for rank in held for shard in rank], exact)
    worse = {name: error for name, error in errors.items() if error > narrow_bound("bf16", single[name])}
    assert not worse, (worse, {name: single[name] for name in worse})


@pytest.mark.parametrize("fault", [None, "grads accumulated in bf16"])
def test_gradients_of_many_micro_batches_are_summed_in_float32(ranks, fault):
    """128 micro batches: a sum in bfloat16 loses what one of them adds."""
    job = replace(job_of(torch.bfloat16), micro_batch_size=1)
    [exact] = ranks.run(first_gradients, job=job_of(torch.float64), rounded=True, batches=16)
    [summed] = ranks.run(first_gradients, job=job, batches=16, fault=fault)
    in_model_type = replace(job, optimizer=changed(ADAMW, accumulation="model"))
    [lossy] = ranks.run(first_gradients, job=in_model_type, batches=16)
    error, expected = (sum(gradient_errors(each, exact).values()) for each in (summed, lossy))
    assert (error < 0.5 * expected) == (fault is None), (error, expected)


# ----------------------------------------------------------------------------------------------------- fp16 overflows

OVERFLOWING = "model.layers.2.self_attn.o_proj.weight"
SMALL_WINDOW = changed(ADAMW, initial_loss_scale_power=6, loss_scale_window=3)


@dataclass
class Overflow:
    """The results of one rank: each step, and the final state."""

    updates: list[Update]
    scales: list[float]
    unchanged: list[bool]
    final: list[Shard]


def train_with_overflow(
    job: Job, folder: str, *, steps: int, overflow_at: int | None = 1, fault: str | None = None
) -> Overflow:
    """Go on from the folder's latest checkpoint up to step `steps`, with an inf planted on one rank, and save."""
    with planted(fault):
        parts = build(job)
        latest = find_latest(Path(folder))
        first = load_checkpoint(latest, parts.replica, parts.optimizer.state).step if latest else 0
        result = Overflow([], [], [], [])
        for step in range(first, steps):
            before = _copies(parts)
            parts.forward_backward(local_batch(job, parts.mesh, step))
            if step == overflow_at:
                _plant_inf(parts)
            parts.optimizer.reduce_gradients()
            result.scales.append(parts.optimizer.loss_scale)
            result.updates.append(parts.update(job.learning_rate))
            result.unchanged.append(all(map(torch.equal, before, _copies(parts))))
        counters = {"step": steps, "samples": 8 * steps, "tokens": 96 * steps}
        save_checkpoint(Path(folder), parts.replica, parts.optimizer.state, trainer_state=counters, config={})
        result.final = shards_of(parts.replica.parameters, parts.replica.tensors, parts.mesh)
        return result


def _plant_inf(parts: Parts) -> None:
    tensors = parts.replica.tensors
    if OVERFLOWING in tensors and parts.mesh.tp.rank == parts.mesh.tp.size - 1 and parts.mesh.batch.rank == 0:
        tensors[OVERFLOWING].grad[0, 0] = torch.inf


def _copies(parts: Parts) -> list[Tensor]:
    states = [shard.values.clone() for shard in parts.optimizer.state.shards()]
    return states + [tensor.detach().clone() for tensor in parts.stage.parameters()]


def test_an_overflow_is_left_out_on_every_rank(ranks, tmp_path):
    layout = Layout(2, 2, 2)
    job = job_of(torch.float16, SMALL_WINDOW, layout=layout)
    job = replace(job, micro_batch_size=1)
    results = ranks.run(train_with_overflow, world_size=8, job=job, folder=str(tmp_path), steps=6)
    for result in results:
        assert [update.skipped for update in result.updates] == [False, True, False, False, False, False]
        assert result.updates[1].overflow == f"{OVERFLOWING} (layer 2)"
        assert result.unchanged == [False, True, False, False, False, False]
        # Three steps without an overflow double it again.
        assert result.scales == [64, 64, 32, 32, 32, 64]
    assert read_manifest(tmp_path / "step-000006").optimizer["step"] == 5


@pytest.mark.parametrize("overflow_at", [0, 1])
def test_a_run_resumed_within_a_window_is_the_undisturbed_one(ranks, tmp_path, overflow_at):
    job = job_of(torch.float16, SMALL_WINDOW, layout=Layout(tensor=2))

    def run(name: str, steps: int) -> list[Overflow]:
        return ranks.run(
            train_with_overflow,
            world_size=2,
            job=job,
            folder=str(tmp_path / name),
            steps=steps,
            overflow_at=overflow_at,
        )

    whole = run("whole", 6)
    run("parts", 3)
    resumed = run("parts", 6)
    for one, other in zip(whole, resumed, strict=True):
        assert (one.updates[3:], one.scales[3:]) == (other.updates, other.scales)
        assert all(torch.equal(a.values, b.values) for a, b in zip(one.final, other.final, strict=True))
    first, second = (read_manifest(tmp_path / name / "step-000006") for name in ("whole", "parts"))
    assert (first.tensors, first.optimizer) == (second.tensors, second.optimizer)


def test_a_step_skipped_on_one_rank_only_is_seen(ranks, tmp_path):
    job = job_of(torch.float16, SMALL_WINDOW, layout=Layout(tensor=2))
    results = ranks.run(
        train_with_overflow,
        world_size=2,
        job=job,
        folder=str(tmp_path),
        steps=2,
        fault="skipped step on one rank only",
    )
    assert [result.updates[1].skipped for result in results] == [False, True]


def overflow_message(job: Job) -> str:
    parts = build(job)
    parts.forward_backward(local_batch(job, parts.mesh, 0))
    _plant_inf(parts)
    parts.optimizer.reduce_gradients()
    with pytest.raises(TrainingError) as caught:
        parts.update(job.learning_rate)
    return str(caught.value)


def test_an_overflow_at_the_smallest_scale_ends_the_run_and_names_the_tensor(ranks):
    smallest = changed(ADAMW, initial_loss_scale_power=0)
    job = job_of(torch.float16, smallest, layout=Layout(pipeline=2))
    [message] = set(ranks.run(overflow_message, world_size=2, job=job))
    assert OVERFLOWING in message and "smallest loss scale, 1:" in message and '"bf16"' in message


def test_what_is_not_finite_without_a_scale_names_the_tensor_on_every_rank(ranks):
    job = job_of(torch.float32, layout=Layout(pipeline=2, tensor=2))
    [message] = set(ranks.run(overflow_message, world_size=4, job=job))
    assert message.startswith(f"the gradient is not finite, first in {OVERFLOWING} (layer 2): no")


# ------------------------------------------------------------------------------------- checkpoints between precisions


def train_and_save(job: Job, folder: str, steps: int) -> tuple[list[float], list[Shard], list[Shard]]:
    """Losses; this rank's weights as they were loaded (or begun with) and at the end, exactly: masters if any."""
    parts = build(job)
    latest = find_latest(Path(folder))
    first = load_checkpoint(latest, parts.replica, parts.optimizer.state).step if latest else 0
    begun = _exact_weights(parts)
    losses = []
    for step in range(first, steps):
        losses.append(parts.accumulate(local_batch(job, parts.mesh, step)))
        parts.update(job.learning_rate)
    counters = {"step": steps, "samples": 8 * steps, "tokens": 96 * steps}
    save_checkpoint(Path(folder), parts.replica, parts.optimizer.state, trainer_state=counters, config={})
    return losses, begun, _exact_weights(parts)


def _exact_weights(parts: Parts) -> list[Shard]:
    masters = {s.parameter.name: s.values for s in parts.optimizer.state.shards() if s.key == MASTER}
    tensors = parts.replica.tensors
    for name, master in masters.items():
        assert torch.equal(tensors[name].detach(), master.view_as(tensors[name]).to(tensors[name].dtype)), (
            name
        )
        tensors[name] = master.view_as(tensors[name]).clone()
    return shards_of(parts.replica.parameters, tensors, parts.mesh)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 1)], ids=str)
def test_bf16_resumes_bit_for_bit(ranks, tmp_path, layout):
    job = job_of(torch.bfloat16, layout=layout)
    job = replace(job, micro_batch_size=1)

    def run(name: str, steps: int) -> list[Any]:
        return ranks.run(
            train_and_save, world_size=layout.world_size, job=job, folder=str(tmp_path / name), steps=steps
        )

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4)
    assert [losses[2:] for losses, *_ in whole] == [losses for losses, *_ in resumed]
    first, second = (read_manifest(tmp_path / name / "step-000004") for name in ("whole", "parts"))
    assert (first.tensors, first.optimizer) == (second.tensors, second.optimizer)
    assert MASTER in first.tensors


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_run_changes_its_precision_without_losing_a_digit(ranks, tmp_path, narrow):
    order = [(torch.float32, 2), (narrow, 4), (torch.bfloat16, 6), (torch.float32, 8)]
    runs = [
        ranks.run(
            train_and_save,
            world_size=2,
            job=job_of(dtype, layout=Layout(tensor=2)),
            folder=str(tmp_path),
            steps=steps,
        )
        for dtype, steps in order
    ]
    for before, after in pairwise(runs):
        for (_, _, ended), (_, begun, _) in zip(before, after, strict=True):
            assert all(torch.equal(a.values, b.values) for a, b in zip(ended, begun, strict=True))


def test_first_nonfinite_is_none_where_all_is_finite(ranks):
    assert ranks.run(nonfinite_after_a_step, world_size=2) == [None, None]


def nonfinite_after_a_step() -> str | None:
    job = job_of(torch.float32, layout=Layout(pipeline=2))
    parts = build(job)
    parts.forward_backward(local_batch(job, parts.mesh, 0))
    return gradients.first_nonfinite(parts.replica.parameters, parts.replica.tensors, parts.mesh)
