"""Train, save, go on elsewhere: the same layout bit for bit, another one within rounding."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from unittest.mock import patch

import pytest
import torch

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.config.sections.schema import OptimizerConfig
from megalite.errors import CheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.checkpoints import save_checkpoint
from tests.support.context_faults import planted_context_fault
from tests.support.options import NO_DROPOUT, Dropout
from tests.support.parity import ADAM_UPDATES, FLOAT32_RTOL, LAYOUT_RTOL, assert_close
from tests.support.ranks import RankFailed, RankPool
from tests.support.tiny import tiny_shape
from tests.support.training import (
    Job,
    RankResult,
    build,
    full_tensors,
    local_batch,
    shards_of,
    whole_weights,
)

ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))
DROPOUT = Dropout(embedding=0.1, residual=0.1, mlp=0.1, attention=0.1)


def train_and_save(job: Job, folder: str) -> RankResult:
    """Go on from the folder's latest checkpoint, if any, up to step `job.steps`, then save.

    The seed is another one after a resume: nothing may depend on it.
    """
    latest = find_latest(Path(folder))
    parts = build(replace(job, seed=99) if latest else job)
    mesh, optimizer = parts.mesh, parts.optimizer
    first = load_checkpoint(latest, parts.replica, optimizer.state).step if latest else 0
    result = RankResult(mesh.batch.rank)
    for step in range(first, job.steps):
        result.losses.append(parts.accumulate(local_batch(job, mesh, step)))
        result.norms.append(parts.update(job.learning_rate).grad_norm)
    counters = {"step": job.steps, "samples": 8 * job.steps, "tokens": 96 * job.steps}
    save_checkpoint(Path(folder), parts.replica, optimizer.state, trainer_state=counters, config={})
    tensors = parts.replica.tensors
    with whole_weights(job.zero_stage, tensors):
        result.final = shards_of(parts.replica.parameters, tensors, mesh)
    return result


def run(ranks: RankPool, job: Job, folder: Path) -> list[RankResult]:
    return ranks.run(train_and_save, world_size=job.layout.world_size, job=job, folder=str(folder))


def job_of(
    layout: Layout,
    zero_stage: int,
    *,
    tied: bool = False,
    steps: int = 4,
    dropout: Dropout = NO_DROPOUT,
) -> Job:
    """ZeRO's master weights are float32, so what uses it is float32 too."""
    return Job(
        tiny_shape(tied=tied),
        layout,
        optimizer=ADAMW,
        learning_rate=1e-2,
        zero_stage=zero_stage,
        dtype=torch.float32 if zero_stage else torch.float64,
        steps=steps,
        dropout=dropout,
    )


@pytest.mark.parametrize(
    ("layout", "zero_stage", "tied"),
    [
        (Layout(), 0, True),
        (Layout(pipeline=2, data=2), 0, True),
        (Layout(context=2), 0, True),
        pytest.param(Layout(pipeline=2, data=2, tensor=2), 1, False, marks=pytest.mark.extended),
        (Layout(data=3), 2, False),
        (Layout(pipeline=2, data=2), 1, True),
        (
            Layout(data=3),
            3,
            True,
        ),  # three ranks divide no parameter: every partition of the last ends in padding
        pytest.param(Layout(data=2, tensor=2), 3, False, marks=pytest.mark.extended),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(
    ranks: RankPool, tmp_path: Path, layout: Layout, zero_stage: int, tied: bool
) -> None:
    job = job_of(layout, zero_stage, tied=tied)
    whole = run(ranks, job, tmp_path / "whole")
    run(ranks, replace(job, steps=2), tmp_path / "parts")
    copytree(tmp_path / "parts", tmp_path / "changed")
    resumed = run(ranks, job, tmp_path / "parts")
    for one, other in zip(whole, resumed, strict=True):
        assert one.losses[2:] == other.losses and one.norms[2:] == other.norms
        assert all(torch.equal(a.values, b.values) for a, b in zip(one.final, other.final, strict=True))
    first, second = (read_manifest(tmp_path / name / "step-000004") for name in ("whole", "parts"))
    assert (first.tensors, first.optimizer, first.files) == (second.tensors, second.optimizer, second.files)
    # And with changed settings: on one rank without ZeRO, in larger micro batches.
    other = replace(job_of(Layout(), 0, tied=tied), micro_batch_size=2, dtype=job.dtype)
    rtol = LAYOUT_RTOL if job.dtype == torch.float64 else FLOAT32_RTOL
    [changed] = run(ranks, other, tmp_path / "changed")
    assert_close(changed.losses, whole[0].losses[2:], rtol=rtol)
    assert_close(changed.norms, whole[0].norms[2:], rtol=rtol)


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        pytest.param(
            job_of(Layout(2, 2, 2), 1),
            replace(job_of(Layout(1, 2, 2), 0), dtype=torch.float32),
            False,
            marks=pytest.mark.extended,
        ),
        (job_of(Layout(1, 3, 1), 3), job_of(Layout(2, 1, 2), 1), True),
        (job_of(Layout(1, 2, 2), 0, dropout=DROPOUT), job_of(Layout(2, 1, 1), 0, dropout=DROPOUT), True),
    ],
)
def test_a_run_goes_on_in_another_optimizer_and_with_its_dropout(
    ranks: RankPool, tmp_path: Path, before: Job, after: Job, tied: bool
) -> None:
    before, after = (replace(job, shape=tiny_shape(tied=tied)) for job in (before, after))
    whole = run(ranks, before, tmp_path / "whole")
    run(ranks, replace(before, steps=2), tmp_path / "parts")
    resumed = run(ranks, after, tmp_path / "parts")
    rtol = LAYOUT_RTOL if before.dtype == torch.float64 else FLOAT32_RTOL
    assert_close(resumed[0].losses, whole[0].losses[2:], rtol=rtol)
    assert_close(resumed[0].norms, whole[0].norms[2:], rtol=rtol)
    ours, theirs = (
        full_tensors(before.shape, [shard for rank in results for shard in rank.final], add=False)
        for results in (resumed, whole)
    )
    for name in theirs:
        assert_close(ours[name], theirs[name], rtol=ADAM_UPDATES * rtol, what=name)
    manifest = read_manifest(tmp_path / "parts" / "step-000004")
    check_coverage(manifest, tmp_path)
    assert manifest.layout == after.layout and manifest.optimizer["step"] == 4


def save_unwritably(job: Job, folder: str, rank: int) -> str:
    """As train_and_save, with a folder in which `rank` may not write; the error's message."""
    mesh = ParallelMesh.over_world(job.layout)
    refusal = PermissionError(13, "Permission denied")
    faulty = patch("megalite.checkpoint.unpublished.write_tensor_file", side_effect=refusal)
    with faulty if mesh.rank == rank else nullcontext(), pytest.raises(CheckpointError) as caught:
        train_and_save(job, folder)
    return str(caught.value)


def test_a_rank_that_cannot_write_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    job = job_of(Layout(pipeline=2, data=2), 0, steps=1)
    run(ranks, job, tmp_path)
    messages = ranks.run(
        save_unwritably, world_size=4, job=replace(job, steps=2), folder=str(tmp_path), rank=2
    )
    [message] = set(messages)
    assert message.startswith("rank 2 (pp 1, dp 0, tp 0) could not write ")
    assert "rank-00002.safetensors" in message and "Permission denied" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]


def save_with_fault(job: Job, folder: str, fault: str) -> None:
    with planted_context_fault(fault):
        train_and_save(job, folder)


def test_a_checkpoint_that_every_context_rank_writes_is_not_published(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = job_of(Layout(context=2), 0, steps=1)
    with pytest.raises(RankFailed, match=r"CheckpointError: .*weight of .* (covered twice|more than once)"):
        ranks.run(
            save_with_fault,
            world_size=2,
            job=job,
            folder=str(tmp_path),
            fault="checkpoint written by every context rank",
        )
    assert find_latest(tmp_path) is None
