"""A run on the compiled operators, in any layout, has the numbers of one process on plain torch."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, train_on_rank

pytestmark = needs_library
DROPPED = {"dropout": Dropout(0.1, 0.2, 0.3, 0.0), "recompute": Recompute("full", layers=1)}


@pytest.mark.parametrize(
    ("shape", "layout", "changes"),
    [
        (tiny_shape(tied=True), Layout(), {}),
        (tiny_shape(), Layout(tensor=2, pipeline=2), DROPPED),
        (FAMILY_SHAPES["gpt2"], Layout(tensor=2), {"sequence_parallel": True}),
        (replace(tiny_shape(), norm_placement="post"), Layout(data=2), {"recompute": Recompute("selective")}),
        (FAMILY_SHAPES["qwen3"], Layout(pipeline=2), {"schedule": "zbv", "chunks_per_stage": 2}),
        (FAMILY_SHAPES["gpt2"], Layout(pipeline=2), {"schedule": "dualpipev", "chunks_per_stage": 2}),
    ],
    ids=["alone", "dropout and recompute", "sequence parallel", "post-norm", "zbv", "dualpipev, layer norm"],
)
def test_layouts_equal_one_process_on_plain_torch(
    ranks, shape: ModelShape, layout: Layout, changes: dict
) -> None:
    job = replace(Job(shape, layout, steps=2, kernels="fused"), **changes)
    plain = replace(
        job,
        kernels="reference",
        layout=Layout(),
        schedule="1f1b",
        chunks_per_stage=1,
        sequence_parallel=False,
        recompute=Recompute(),
    )
    [alone] = ranks.run(train_on_rank, world_size=1, job=plain)
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)
