"""gpt-oss trains to the numbers of one process in every layout: sinks, windows, and experts with biases and a clamp."""

from dataclasses import replace
from typing import Any

import pytest

from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.gpt_oss_faults import GPT_OSS_FAULTS, train_with_fault
from tests.support.options import Dropout, Recompute
from tests.support.parity import OPERATOR_RTOL
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job

DENSE = replace(
    tiny_shape(),
    attention_sinks=True,
    sliding_window=5,
    full_attention_every=2,
    attention_bias=True,
    attention_output_bias=True,
    initializer_range=0.2,
)
# Seven experts, which no number of ranks divides; a limit that a third of the values are beyond.
EXPERTS = ExpertShape(7, 3, 22, router_bias=True, expert_bias=True, swiglu_limit=0.4)
SHAPE = MixtureShape(**vars(DENSE), experts=EXPERTS)
# The second step starts from sinks and biases of which no two are the same.
JOB = Job(SHAPE, steps=2, micro_batch_size=2, router_balance=0.3, router_z=0.05)
DROPPED: dict[str, Any] = {"documents": True, "dropout": Dropout(embedding=0.1, residual=0.2, attention=0.25)}
CONTEXT = Layout(context=2)
JOBS = {
    "tp2, sequence, documents": replace(JOB, layout=Layout(tensor=2), sequence_parallel=True, documents=True),
    "tp8, shared heads": replace(JOB, layout=Layout(tensor=8)),
    "tp2, sequence, cut": replace(JOB, layout=Layout(tensor=2), sequence_parallel=True),
    "tp2 ep2, sequence, whole": replace(
        JOB, layout=Layout(tensor=2, expert=2, expert_tensor=1), sequence_parallel=True
    ),
    "tp2 dp2 ep2, cut": replace(JOB, layout=Layout(tensor=2, data=2, expert=2)),
    "dp2 ep2": replace(JOB, layout=Layout(data=2, expert=2)),
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
    "cp2 ep2": replace(JOB, layout=replace(CONTEXT, expert=2)),
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
    cases(
        JOBS,
        core=(
            "tp2, sequence, cut",
            "tp2 ep2, sequence, whole",
            "tp2 dp2 ep2, cut",
            "pp2, zbv, recompute",
            "cp2 ep2",
            "ulysses",
            "ring",
        ),
    ),
)
def test_it_equals_one_process(ranks, reference, name):
    _compare(ranks, reference, JOBS[name])


@pytest.mark.parametrize("name", cases(GPT_OSS_FAULTS, core=("sink of every context rank",)))
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    job = replace(JOB, **GPT_OSS_FAULTS[name].changes)
    with pytest.raises(AssertionError, match="relative error") as departed:
        _compare(ranks, reference, job, name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
