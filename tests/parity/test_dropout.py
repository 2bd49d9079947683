"""Dropout drops the same values in every layout: loss, norm, every gradient and the weights after, in float64."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import assert_close, assert_same_tensors, relative_error
from tests.support.tiny import tiny_shape
from tests.support.training import Job, RankResult, full_gradients, full_tensors, train_on_rank

SITES = {
    "embedding": Dropout(embedding=0.2),
    "residual": Dropout(residual=0.2),
    "mlp": Dropout(mlp=0.2),
    "attention": Dropout(attention=0.2),
}
EVERYWHERE = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), dropout=EVERYWHERE, steps=2)


def assert_same_training(job: Job, results: list[RankResult], alone: RankResult) -> None:
    for result in results:
        assert_close(result.losses, alone.losses, what="losses")
        assert_close(result.norms, alone.norms, what="norms")
    one = replace(job, layout=Layout())
    assert_same_tensors(full_gradients(job, results), full_gradients(one, [alone]))
    assert_same_tensors(
        full_tensors(job.shape, [shard for result in results for shard in result.final], add=False),
        full_tensors(job.shape, alone.final, add=False),
    )


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tensor=2), {}),
        (Layout(tensor=4), {"micro_batch_size": 4}),
        (Layout(data=2), {}),
        (Layout(data=4), {"micro_batch_size": 2}),
        (Layout(pipeline=4), {}),
        (Layout(), {"micro_batch_size": 8}),
        (Layout(pipeline=2), {"layers_per_stage": (1, 3), "schedule": "gpipe"}),
        (Layout(pipeline=2, data=2, tensor=2), {"micro_batch_size": 2}),
        (Layout(pipeline=2), {"schedule": "interleaved_1f1b", "chunks_per_stage": 2}),
        (Layout(pipeline=2), {"schedule": "interleaved_zero_bubble", "chunks_per_stage": 2}),
        (Layout(pipeline=2), {"schedule": "zbv", "chunks_per_stage": 2}),
        (Layout(pipeline=2), {"schedule": "dualpipev", "chunks_per_stage": 2}),
    ],
    ids=str,
)
def test_every_layout_drops_the_same_values(ranks, reference, layout, changes):
    job = replace(JOB, layout=layout, **changes)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    assert_same_training(job, results, reference(JOB))


@needs_library
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tensor=2, data=2), {"micro_batch_size": 2, "recompute": Recompute("selective")}),
        (Layout(tensor=4), {"recompute": Recompute("full")}),
        (Layout(pipeline=2), {"schedule": "zbv", "chunks_per_stage": 2}),
    ],
    ids=str,
)
def test_compiled_attention_drops_what_plain_torch_drops(ranks, reference, layout, changes):
    job = replace(JOB, dropout=SITES["attention"], kernels="fused", layout=layout, **changes)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    assert_same_training(job, results, reference(replace(JOB, dropout=SITES["attention"])))


@pytest.mark.parametrize("site", SITES)
def test_each_site_drops_in_a_layout_as_in_one_process(ranks, reference, site):
    """Each alone: a site that is never dropped would agree with itself."""
    alone = replace(JOB, dropout=SITES[site])
    without = reference(replace(JOB, dropout=Dropout()))
    assert relative_error(reference(alone).losses, without.losses) > 1e-6
    job = replace(alone, layout=Layout(tensor=2, data=2), micro_batch_size=2)
    results = ranks.run(train_on_rank, world_size=4, job=job)
    assert_same_training(job, results, reference(alone))
