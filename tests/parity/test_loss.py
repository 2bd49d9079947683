"""Label smoothing and z-loss are one process's in every layout, where the vocabulary is cut unevenly."""

from dataclasses import replace

import pytest

from megalite.topology.layout import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.parity import LAYOUT_RTOL
from tests.support.tiny import tiny_shape
from tests.support.training import Job, train_on_rank


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(1, 2, 4), Layout(2, 2, 2)], ids=str)
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.2, 0.0), (0.0, 0.01), (0.1, 0.02)])
def test_the_loss_of_every_layout_is_one_processs(ranks, layout, label_smoothing, z_loss):
    job = Job(tiny_shape(tied=True), layout, label_smoothing=label_smoothing, z_loss=z_loss, steps=2)
    [alone] = ranks.run(train_on_rank, world_size=1, job=replace(job, layout=Layout()))
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL)
