"""Every family trains to one process's numbers in layouts that cut all that it has: heads, biases, stages."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.parity import LAYOUT_RTOL
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES
from tests.support.training import Job, train_on_rank


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2, 1, 2), id="tp2-pp2"),
        pytest.param(Layout(1, 2, 4), id="tp4-dp2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "shape",
    # The core has one shape of each family.
    cases(
        [pytest.param(shape, id=name) for name, shape in FAMILY_SHAPES.items()],
        core=list({shape.family: shape for shape in FAMILY_SHAPES.values()}.values()),
    ),
)
def test_every_family_equals_one_process(ranks, shape, layout):
    job = Job(shape, layout, micro_batch_size=2, steps=2)
    [alone] = ranks.run(train_on_rank, world_size=1, job=replace(job, layout=Layout()))
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)
