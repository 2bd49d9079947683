"""With ring attention a model trains to the same numbers as one process, whenever the ranks' messages leave."""

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.launcher.control.failures import FailureFolder, FailureReport
from megalite.launcher.control.progress import progress
from megalite.launcher.control.verdicts import describe_job
from megalite.launcher.rank.detect import local_rank_infos
from megalite.parallel import context_ring
from megalite.parallel.collectives import Pending
from megalite.parallel.mesh import ParallelMesh, RankGroup
from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.context_faults import FAULTS_ELSEWHERE, planted_context_fault
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, build, local_batch, train_on_rank
from tests.support.waiting import PATIENCE

DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(
    tiny_shape(tied=True),
    Layout(context=2),
    context_method="ring",
    micro_batch_size=2,
    steps=2,
    documents=True,
    dropout=DROPOUT,
)
STAGES = Layout(pipeline=2, context=2)
CASES = {
    "1f1b": replace(JOB, layout=STAGES),
    "interleaved": replace(JOB, layout=STAGES, schedule="interleaved_1f1b", chunks_per_stage=2),
    "zbv": replace(JOB, layout=STAGES, schedule="zbv", chunks_per_stage=2),
    "dualpipev, all recomputed": replace(
        JOB, layout=STAGES, schedule="dualpipev", chunks_per_stage=2, recompute=Recompute("full")
    ),
    "attention recomputed": replace(JOB, recompute=Recompute("selective"), kernels="fused"),
    "four ranks": replace(JOB, layout=Layout(context=4), sequence_length=24),
    "tensor and sequence parallel": replace(
        JOB, layout=Layout(tensor=2, context=2), sequence_parallel=True, kernels="fused"
    ),
    "gemma2": replace(JOB, shape=FAMILY_SHAPES["gemma2"], dropout=Dropout()),
    "mistral": replace(JOB, shape=FAMILY_SHAPES["mistral"], documents=False),
    "ZeRO 1": replace(JOB, layout=Layout(data=2, context=2), zero_stage=1),
}


def train_with_delays(job: Job) -> RankResult:
    """Train on this rank, which waits for a random time before each rotation."""
    drawn, start = random.Random(dist.get_rank()), context_ring.start_rotation

    def start_later(values: Tensor, ranks: RankGroup) -> Pending:
        time.sleep(drawn.uniform(0, 0.01))
        return start(values, ranks)

    with mock.patch.object(context_ring, "start_rotation", start_later):
        return train_on_rank(job)


@pytest.mark.parametrize(
    "case", cases(CASES, core=["1f1b", "dualpipev, all recomputed", "four ranks", "ZeRO 1"])
)
def test_it_is_one_process(ranks, reference, case) -> None:
    job = CASES[case]
    results = ranks.run(train_with_delays, world_size=job.layout.world_size, job=job)
    alone = replace(job, layout=Layout(), sequence_parallel=False, schedule="1f1b", chunks_per_stage=1)
    rtol = ZERO_RTOL if job.zero_stage else LAYOUT_RTOL
    _assert_equal_to_one_process(job, results, reference(replace(alone, zero_stage=0)), rtol)


def report_of(job: Job, folder: Path, fault: str | None, seconds: float) -> FailureReport | None:
    """Run forward, backward and reduction with the fault; return the report of a rank that fails.

    seconds: launch.collective_seconds.
    """
    progress.restart()
    limited = partial(ParallelMesh.over_world, collective_seconds=seconds)
    with planted_context_fault(fault), mock.patch.object(ParallelMesh, "over_world", limited):
        parts = build(job)
        batch = local_batch(job, parts.mesh, 0)
        parts.mesh.barrier()  # a rank that starts late is none that hangs
        try:
            parts.pipeline.forward_backward(batch, torch.ones((), dtype=job.dtype), 1.0)
            parts.optimizer.reduce_gradients()
        except RuntimeError as error:
            info = local_rank_infos(job.layout.world_size, folder)[dist.get_rank()]
            return FailureFolder(folder, job.layout, "job").of_exception(info, error)
    return None


def test_a_recomputed_region_without_a_rotation_ends_in_time_and_is_named(ranks, tmp_path) -> None:
    fault = "recompute without a rotation"
    job = replace(JOB, **FAULTS_ELSEWHERE[fault].changes)
    run = partial(ranks.run, report_of, world_size=2, job=job, folder=tmp_path)
    assert run(fault=None, seconds=PATIENCE) == [None, None]
    waiting, other = run(fault=fault, seconds=3.0)
    for report in (waiting, other):
        assert report is not None
        assert "did not join a collective within launch.collective_seconds" in report.headline, report
    text = describe_job([waiting], 2)
    assert text.startswith("rank 0 (pp 0, dp 0, cp 0, tp 0) on "), text
    assert "last collective: rotate over cp" in text, text
