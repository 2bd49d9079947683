"""Rows with documents of any length, cut by work or in any other way: one process's losses, gradients and weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.data.batches.context_blocks import block_work, windows_of, with_blocks
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.topology.context import cut_by_work
from tests.support import training
from tests.support.options import Dropout, Recompute
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.tiny_run import tiny_trainer, write_token_files
from tests.support.training import Job, RankResult, full_gradients, full_tensors, train_on_rank

LENGTH, BLOCKS = 48, 4
DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), sequence_length=LENGTH, micro_batch_size=2, steps=2)


def document_lengths(row: int, length: int) -> Iterator[int]:
    """Yield the lengths of a row's documents: one, single tokens, or a few that end anywhere."""
    draw, left = Random(row), length
    while left:
        longest = (length, 1, length // 2, 7)[row % 4]
        taken = longest if row % 4 < 2 else draw.randint(1, min(longest, left))
        yield taken
        left -= taken


def with_documents(batch: StepBatch) -> StepBatch:
    ids, positions = torch.empty_like(batch.input_ids), torch.empty_like(batch.input_ids)
    for row, sample in enumerate(batch.sample_indices.tolist()):
        lengths = [*document_lengths(sample, ids.shape[1])]
        ids[row] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions[row] = torch.cat([torch.arange(taken) for taken in lengths])
    return replace(batch, document_ids=ids, position_ids=positions)


def cut_batch(batch: StepBatch, ranks: int, job: Job, how: str) -> StepBatch:
    """Cut rows by work, at random, or ("loader") as training does, in blocks of 32 positions or more."""
    windows = windows_of(job.shape)
    if how == "loader":
        return with_blocks(batch, ranks, windows)
    assert batch.document_ids is not None
    tables = []
    for row, sample in zip(batch.document_ids.numpy(), batch.sample_indices.tolist(), strict=True):
        blocks = ranks * BLOCKS
        if how == "work":
            cut = cut_by_work(block_work(row, blocks, windows).tolist(), ranks)
        else:
            order = Random(sample).sample(range(blocks), blocks)
            cut = tuple(tuple(sorted(order[rank::ranks])) for rank in range(ranks))
        tables.append(cut)
    return replace(batch, blocks=torch.tensor(tables).flatten(1))


def train_cut(job: Job, how: str) -> RankResult:
    local_batch = training.local_batch

    def cut(job: Job, mesh: ParallelMesh, step: int) -> StepBatch:
        batch = with_documents(local_batch(job, mesh, step))
        return batch if mesh.cp.size == 1 else cut_batch(batch, mesh.cp.size, job, how)

    with mock.patch.object(training, "local_batch", cut):
        return train_on_rank(job)


def losses_and_blocks(folder: Path, changes: Mapping[str, Any]) -> tuple[list[float], Tensor | None]:
    """Return the losses of two steps of `megalite train`'s trainer, and the block table of its first batch."""
    trainer, _ = tiny_trainer(
        folder, {**changes, "training.sequence_length": 128, "data.document_mask": "true"}
    )
    with trainer.batches, trainer.prefetch(trainer.loader, end=4) as batches:
        blocks = batches.step_batch(0).ready().blocks
        return [trainer.train_step().loss for _ in range(2)], blocks


@pytest.fixture(scope="module")
def alone(ranks):
    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_cut, world_size=1, job=job, how="")
        return result

    return run


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("work", {"layout": Layout(context=2), "dropout": DROPOUT}),
        ("random", {"layout": Layout(context=4), "shape": FAMILY_SHAPES["mistral"]}),
        ("loader", {"layout": Layout(context=2, tensor=2), "sequence_parallel": True, "dropout": DROPOUT}),
        ("random", {"layout": Layout(context=2, pipeline=2), "schedule": "zbv", "chunks_per_stage": 2}),
        ("work", {"layout": Layout(context=4), "kernels": "fused"}),
        ("loader", {"layout": Layout(context=2), "kernels": "fused", "recompute": Recompute("selective")}),
        ("random", {"layout": Layout(context=2, data=2), "kernels": "fused", "dropout": DROPOUT}),
        ("work", {"layout": Layout(context=2), "shape": FAMILY_SHAPES["gemma2"]}),
    ],
    ids=["dropout", "window", "tensor", "pipeline", "compiled", "recompute", "data", "gemma2"],
)
def test_a_cut_row_trains_as_the_whole_row(ranks, alone, how, changes):
    length = 64 * changes["layout"].context if how == "loader" else LENGTH
    job = replace(JOB, sequence_length=length, **changes)
    job = replace(job, shape=replace(job.shape, max_position_embeddings=length))
    expected = alone(
        replace(
            job, layout=Layout(), sequence_parallel=False, schedule="1f1b", chunks_per_stage=1, recompute=Recompute(),
            micro_batch_size=1, kernels="reference",
        )
    )  # fmt: skip
    results = ranks.run(train_cut, world_size=job.layout.world_size, job=job, how=how)
    one = replace(job, layout=Layout())
    for result in results:
        assert_close(result.losses, expected.losses, what="loss")
        assert_close(result.norms, expected.norms, what="norm")
    assert_same_tensors(full_gradients(job, results), full_gradients(one, [expected]))
    final = [shard for result in results for shard in result.final]
    assert_same_tensors(
        full_tensors(job.shape, final, add=False), full_tensors(job.shape, expected.final, add=False)
    )


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_a_trainer_cuts_the_rows_of_gather_by_work(ranks, tmp_path, method):
    write_token_files(tmp_path, documents=(88, 40) * 4)
    [(expected, no_blocks)] = ranks.run(losses_and_blocks, world_size=1, folder=tmp_path, changes={})
    assert no_blocks is None
    changes = {"parallel.context": 2, "parallel.context_method": method}
    for losses, blocks in ranks.run(losses_and_blocks, world_size=2, folder=tmp_path, changes=changes):
        assert_close(losses, expected, what="loss")
        assert (blocks is not None) == (method == "gather")
