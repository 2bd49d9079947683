"""Compiled decoder layers give the numbers of plain ones, through one function for all layers."""

import shutil
from dataclasses import replace

import pytest
import torch

from megalite.topology.adapter import Prefix
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from tests.parity.test_latent_attention import SHAPE as LATENT_SHAPE
from tests.support.options import Dropout, Recompute
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, full_gradients, full_tensors, train_on_rank

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), steps=2, compile=True)
UNSPLIT = [
    {"schedule": name, "chunks_per_stage": schedule.default_chunks}
    for name, schedule in SCHEDULES.items()
    if not schedule.splits_backward
]


def _assert_equal_to_plain_layers(ranks, job: Job, rtol: float = LAYOUT_RTOL) -> None:
    plain = replace(job, layout=Layout(), schedule="1f1b", chunks_per_stage=1, zero_stage=0, compile=False)
    [alone] = ranks.run(train_on_rank, world_size=1, job=plain)
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    for result in results:
        assert_close(result.losses, alone.losses, rtol=rtol, what="losses")
        assert_close(
            result.norms, alone.norms, rtol=max(rtol, ZERO_RTOL if job.zero_stage else 0), what="norms"
        )
    assert_same_tensors(full_gradients(job, results), full_gradients(plain, [alone]), rtol=rtol)
    assert_same_tensors(
        full_tensors(job.shape, [shard for result in results for shard in result.final], add=False),
        full_tensors(job.shape, alone.final, add=False),
        rtol=rtol,
    )


def graphs_compiled(job: Job) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train_on_rank(job)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.extended
def test_all_layers_share_one_compiled_function(ranks):
    _assert_equal_to_plain_layers(ranks, JOB)
    assert ranks.run(graphs_compiled, world_size=1, job=JOB) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rtol"),
    [
        ({"dropout": DROPOUT}, LAYOUT_RTOL),
        ({"dropout": DROPOUT, "recompute": Recompute("full")}, LAYOUT_RTOL),
        ({"dropout": DROPOUT, "recompute": Recompute("full", ratio=0.5)}, LAYOUT_RTOL),
        ({"dtype": torch.float32, "steps": 5}, FLOAT32_RTOL),
        ({"layout": Layout(data=2), "zero_stage": 1, "dtype": torch.float32, "steps": 5}, FLOAT32_RTOL),
        ({"layout": Layout(data=2), "zero_stage": 2, "dtype": torch.float32, "steps": 5}, FLOAT32_RTOL),
        *(({"layout": Layout(pipeline=2), **schedule}, LAYOUT_RTOL) for schedule in UNSPLIT),
    ],
    ids=str,
)
def test_compiled_layers_equal_plain_ones(ranks, changes, rtol):
    _assert_equal_to_plain_layers(ranks, replace(JOB, **changes), rtol)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FAMILY_SHAPES.values(), ids=FAMILY_SHAPES)
def test_layers_of_every_family_are_compiled_whole(ranks, shape):
    _assert_equal_to_plain_layers(ranks, replace(JOB, shape=shape, dropout=DROPOUT))


@pytest.mark.slow
def test_layers_with_latent_attention_are_compiled_whole(ranks):
    _assert_equal_to_plain_layers(ranks, replace(JOB, shape=LATENT_SHAPE, dropout=DROPOUT, documents=True))


@pytest.mark.slow
def test_layers_with_a_prefix_in_windows_and_documents_are_compiled_whole(ranks):
    shape = replace(FAMILY_SHAPES["mistral"], adapter=Prefix(3, projection=10))
    _assert_equal_to_plain_layers(ranks, replace(JOB, shape=shape, dropout=DROPOUT, documents=True))
