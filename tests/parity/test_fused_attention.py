"""Windows, documents, dropped probabilities on compiled attention: plain torch's numbers, alone and in layouts."""

from dataclasses import replace
from unittest import mock

import pytest

from megalite.ops import choice, extension
from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, train_on_rank

pytestmark = needs_library


def train_and_count(job: Job) -> tuple[RankResult, int]:
    """A run, and how often the compiled operator attended."""
    with mock.patch.object(choice, "compiled_attention", wraps=choice.compiled_attention) as attend:
        return train_on_rank(job), attend.call_count


@pytest.mark.parametrize(
    ("job", "calls"),
    [
        (Job(FAMILY_SHAPES["mistral"], Layout(tensor=2)), True),
        (
            Job(
                tiny_shape(tied=True), Layout(pipeline=2), documents=True, schedule="zbv", chunks_per_stage=2
            ),
            True,
        ),
        (Job(FAMILY_SHAPES["mistral"], documents=True, recompute=Recompute("selective")), True),
        (Job(tiny_shape(tied=True)), extension.built().cpu == "x86-64-v4"),
        (Job(tiny_shape(tied=True), dropout=Dropout(attention=0.1)), True),
        (
            Job(FAMILY_SHAPES["mistral"], Layout(tensor=2), documents=True, dropout=Dropout(attention=0.1)),
            True,
        ),
    ],
    ids=["window", "documents, zbv", "both, recomputed", "neither", "dropped", "dropped, both"],
)
def test_it_has_the_numbers_of_plain_torch(ranks, job: Job, calls: bool) -> None:
    plain = replace(job, layout=Layout(), schedule="1f1b", chunks_per_stage=1, recompute=Recompute())
    [alone] = ranks.run(train_on_rank, world_size=1, job=plain)
    fused = replace(job, kernels="fused")
    results = ranks.run(train_and_count, world_size=job.layout.world_size, job=fused)
    assert all((count > 0) == calls for _, count in results)
    _assert_equal_to_one_process(fused, [result for result, _ in results], alone, LAYOUT_RTOL)
