"""Whole training steps on a device without numbers: an operator that mixes devices, or waits for one, is refused.

Every tensor of a step lies on torch's `meta` device, which refuses operators of mixed devices as a GPU does and has no
numbers that a host could read. Compiled operators run by the forms that torch.library has of them. A process group
without peers takes the collectives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.config.sections.schema import OptimizerConfig
from megalite.data.batches.context_blocks import windows_of, with_blocks
from megalite.ops.documents import row_cu_seqlens
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.options import Dropout, Recompute
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import SGD, Job, build, global_batch, rows_of, whole_loss

ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5, clip_value=1.0, ema_decay=0.9))
EVERYTHING_DROPS = Dropout(embedding=0.1, residual=0.1, mlp=0.1, attention=0.1)


def transfer(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A tensor that stages send each other is on the device, too."""
    assert tensor.device.type == "meta" and tensor.is_contiguous()
    return mock.Mock()


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    """A process group of that size whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    new_group = dist.new_group

    def without_peers(*ranks: Any, **options: Any) -> Any:
        return new_group(*ranks, **options | {"backend": "fake"})

    try:
        with (
            mock.patch.multiple(dist, new_group=without_peers, all_gather_object=mock.DEFAULT),
            mock.patch.multiple(dist, isend=transfer, irecv=transfer),
            mock.patch.multiple(dist, P2POp=mock.DEFAULT, batch_isend_irecv=lambda messages: []),
            mock.patch("megalite.parallel.mesh.accelerator_id"),  # there is none
        ):
            yield
    finally:
        dist.destroy_process_group()


def batch_on_meta(job: Job) -> StepBatch:
    """A batch as a trainer gives it: what the host must know of its documents was computed in host memory."""
    batch = global_batch(job, 0)
    batch = rows_of(batch, slice(0, len(batch.input_ids) // job.layout.data))
    if batch.document_ids is not None:
        batch = replace(batch, cu_seqlens=row_cu_seqlens(batch.document_ids))
        if job.context_method == "gather":
            batch = with_blocks(batch, job.layout.context, windows_of(job.shape))
    return batch.on_device(lambda tensor: tensor.to("meta"))


def step_on_meta(job: Job) -> list[str]:
    """One step of the job on each stage's first rank, and an evaluation; what the host asked of a tensor's numbers."""
    asked: list[str] = []

    def number(tensor: torch.Tensor) -> float:
        asked.append("number")
        assert tensor.numel() == 1
        return 1.0

    for stage in range(job.layout.pipeline):
        with (
            rank_of(job.layout, stage * job.layout.tensor),
            mock.patch.multiple(torch.Tensor, item=number, __float__=number),
        ):
            parts = build(replace(job, device="meta"))
            batch = batch_on_meta(job)
            asked.clear()
            loss = whole_loss(parts.pipeline, batch, parts.mesh)
            parts.optimizer.reduce_gradients()
            assert (loss.device.type, loss.shape, loss.dtype) == ("meta", (), torch.float64)
            assert not asked, "the host asked for a number in forward or backward"
            parts.optimizer.step(0.1, float(parts.optimizer.squared_norm()))
            for name, tensor in parts.stage.named_parameters():
                assert tensor.device.type == "meta" and tensor.grad is None, name
            assert parts.pipeline.evaluate(batch).device.type == "meta"
    return asked


CONTEXT = Layout(context=2)
JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {"layout": Layout(pipeline=2)},
    "gpipe, tensor": {"layout": Layout(pipeline=2, tensor=2), "schedule": "gpipe"},
    "interleaved": {"layout": Layout(pipeline=2), "schedule": "interleaved_1f1b", "chunks_per_stage": 2},
    "breadth first": {"layout": Layout(pipeline=2), "schedule": "looped_bfs", "chunks_per_stage": 2},
    "zero bubble": {
        "layout": Layout(pipeline=2),
        "schedule": "interleaved_zero_bubble",
        "chunks_per_stage": 2,
    },
    "zbv": {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2},
    "dualpipev": {"layout": Layout(pipeline=2), "schedule": "dualpipev", "chunks_per_stage": 2},
    "data": {"layout": Layout(data=2)},
    "sequence parallel": {"layout": Layout(tensor=2, data=2), "sequence_parallel": True},
    "recompute selective": {"recompute": Recompute("selective")},
    "recompute full": {"recompute": Recompute("full")},
    "dropout, tensor": {"layout": Layout(tensor=2), "dropout": EVERYTHING_DROPS},
    "bf16": {"dtype": torch.bfloat16, "optimizer": ADAMW},
    "fp16": {"dtype": torch.float16, "optimizer": ADAMW},
    "float32": {"dtype": torch.float32, "optimizer": ADAMW},
    "loss terms": {"label_smoothing": 0.1, "z_loss": 0.01},
    "chunked loss": {"layout": Layout(tensor=2), "chunked_loss": 8},
    "gathered keys, rows cut by work": {"layout": CONTEXT, "documents": True, "dropout": EVERYTHING_DROPS},
    "ulysses": {"layout": CONTEXT, "documents": True, "context_method": "ulysses"},
    "ring": {"layout": CONTEXT, "documents": True, "context_method": "ring", "recompute": Recompute("full")},
}


@pytest.mark.parametrize("kernels", cases(["reference", "fused"], core=["fused"]))
@pytest.mark.parametrize("name", JOBS)
def test_a_step_needs_no_other_device(name: str, kernels: Any) -> None:
    step_on_meta(Job(tiny_shape(), **JOBS[name], micro_batch_size=2, kernels=kernels))


@pytest.mark.parametrize("kernels", cases(["reference", "fused"], core=["fused"]))
@pytest.mark.parametrize("family", FAMILY_SHAPES)
def test_a_step_of_each_family_needs_no_other_device(family: str, kernels: Any) -> None:
    job = Job(FAMILY_SHAPES[family], micro_batch_size=4, kernels=kernels, dtype=torch.float32, optimizer=SGD)
    step_on_meta(job)


def test_a_batch_left_on_the_cpu_is_refused() -> None:
    with (
        mock.patch("megalite.parallel.step_batch.StepBatch.map", lambda self, change: self),
        pytest.raises(RuntimeError, match="device"),
    ):
        step_on_meta(Job(tiny_shape()))
