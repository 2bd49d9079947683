"""gpt-oss trains to the numbers of one process in every layout: sinks of attention between layers with a window."""

from dataclasses import replace
from typing import Any

import pytest

from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.options import Dropout, Recompute
from tests.support.parity import OPERATOR_RTOL
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.sink_faults import SINK_FAULTS, train_with_fault
from tests.support.tiny import tiny_shape
from tests.support.training import Job

SHAPE = replace(
    tiny_shape(),
    attention_sinks=True,
    sliding_window=5,
    full_attention_every=2,
    attention_bias=True,
    attention_output_bias=True,
    initializer_range=0.2,
)
# The second step starts from sinks of which no two are the same.
JOB = Job(SHAPE, steps=2, micro_batch_size=2)
DROPPED: dict[str, Any] = {"documents": True, "dropout": Dropout(embedding=0.1, residual=0.2, attention=0.25)}
CONTEXT = Layout(context=2)
JOBS = {
    "tp2, sequence, documents": replace(JOB, layout=Layout(tensor=2), sequence_parallel=True, documents=True),
    "tp8, shared heads": replace(JOB, layout=Layout(tensor=8)),
    "pp2, zbv, recompute": replace(
        JOB,
        layout=Layout(pipeline=2),
        schedule="zbv",
        chunks_per_stage=2,
        recompute=Recompute("full"),
        **DROPPED,
    ),
    "dp2, recomputed attention": replace(
        JOB, layout=Layout(data=2), recompute=Recompute("selective"), **DROPPED
    ),
    "cp2": replace(JOB, layout=CONTEXT),
    "cp2, documents, dropout, compiled": replace(JOB, layout=CONTEXT, kernels="fused", **DROPPED),
    "ulysses": replace(JOB, layout=CONTEXT, context_method="ulysses", **DROPPED),
    "ring": replace(JOB, layout=CONTEXT, context_method="ring", **DROPPED),
    "tp2 cp2, ring, compiled": replace(
        JOB, layout=Layout(tensor=2, context=2), context_method="ring", kernels="fused"
    ),
    "compiled": replace(JOB, layout=Layout(data=2), kernels="fused", **DROPPED),
}
ALONE: dict[str, Any] = {
    "layout": Layout(),
    "schedule": "1f1b",
    "chunks_per_stage": 1,
    "sequence_parallel": False,
    "context_method": "gather",
    "recompute": Recompute(),
    "kernels": "reference",
}


def _compare(ranks, reference, job: Job, fault: str | None = None) -> None:
    results = ranks.run(train_with_fault, world_size=job.layout.world_size, job=job, fault=fault)
    _assert_equal_to_one_process(job, results, reference(replace(job, **ALONE)), OPERATOR_RTOL)


@pytest.mark.parametrize(
    "name",
    cases(JOBS, core=("tp2, sequence, documents", "pp2, zbv, recompute", "cp2", "ulysses", "ring")),
)
def test_it_equals_one_process(ranks, reference, name):
    _compare(ranks, reference, JOBS[name])


@pytest.mark.parametrize("name", cases(SINK_FAULTS, core=("sink of every context rank",)))
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    job = replace(JOB, **SINK_FAULTS[name].changes)
    with pytest.raises(AssertionError, match="relative error") as departed:
        _compare(ranks, reference, job, name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
