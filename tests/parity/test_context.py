"""Ranks that share sequences train to the numbers of one process: loss, norm, every gradient and the weights after."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megalite.parallel.objective import Preference
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.axes import Layout
from tests.parity.test_documents import SHAPES as LONGER
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.context_faults import CONTEXT_FAULTS, planted_context_fault
from tests.support.museum import exhibit
from tests.support.options import Dropout, Recompute
from tests.support.parity import OPERATOR_RTOL, ZERO_RTOL
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, RankResult, train_on_rank

DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.3, attention=0.25)
JOB = Job(tiny_shape(tied=True), Layout(context=2), documents=True, dropout=DROPOUT, steps=2)
PLAIN = Job(tiny_shape(tied=True), Layout(context=2), steps=2)
ULYSSES: dict[str, Any] = {"context_method": "ulysses"}
FOUR: dict[str, Any] = {"layout": Layout(context=4), "sequence_length": 24}
LORA = replace(PLAIN.shape, adapter=Lora(3, 6.0, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")))
WITH_LORA = replace(JOB, shape=LORA, dropout=Dropout(residual=0.2, attention=0.1, adapter=0.3))
PREFIX = replace(PLAIN, shape=replace(tiny_shape(), adapter=Prefix(3, projection=10)))
FEW_KEYS = replace(tiny_shape(), num_key_value_heads=2)
JOBS = {
    "gather": JOB,
    "ulysses": replace(JOB, **ULYSSES),
    "4 ranks": replace(JOB, **FOUR),
    "4 ranks, ulysses, key-value heads repeated": replace(JOB, shape=FEW_KEYS, **FOUR, **ULYSSES),
    "tp2, sequence": replace(JOB, layout=Layout(tensor=2, context=2), sequence_parallel=True),
    "tp2, sequence, ulysses": replace(
        JOB, layout=Layout(tensor=2, context=2), sequence_parallel=True, **ULYSSES
    ),
    "zbv, recompute": replace(
        JOB,
        layout=Layout(pipeline=2, context=2),
        schedule="zbv",
        chunks_per_stage=2,
        recompute=Recompute("full"),
    ),
    "dualpipev, ulysses, recompute": replace(
        JOB,
        layout=Layout(pipeline=2, context=2),
        schedule="dualpipev",
        chunks_per_stage=2,
        recompute=Recompute("full"),
        **ULYSSES,
    ),
    "interleaved zero bubble": replace(
        JOB, layout=Layout(pipeline=2, context=2), schedule="interleaved_zero_bubble", chunks_per_stage=2
    ),
    "dp2, ZeRO 2": replace(PLAIN, layout=Layout(data=2, context=2), zero_stage=2),
    "ZeRO 1": replace(PLAIN, zero_stage=1),
    "ZeRO 3": replace(PLAIN, zero_stage=3),
    "recomputed attention, larger micro batches": replace(
        JOB, recompute=Recompute("selective"), micro_batch_size=4
    ),
    "windows": replace(PLAIN, shape=FAMILY_SHAPES["mistral"]),
    "windows, documents, ulysses": replace(PLAIN, shape=FAMILY_SHAPES["mistral"], documents=True, **ULYSSES),
    "soft caps, windows, documents": replace(PLAIN, shape=FAMILY_SHAPES["gemma2"], documents=True),
    "learned positions": replace(JOB, shape=FAMILY_SHAPES["gpt2"], recompute=Recompute("full")),
    "lengths of LongRoPE": replace(PLAIN, shape=LONGER["longrope"], documents=True),
    "lengths of dynamic NTK": replace(PLAIN, shape=LONGER["dynamic"]),
    "compiled operators": replace(JOB, kernels="fused"),
    "compiled operators, documents": replace(PLAIN, kernels="fused", documents=True, micro_batch_size=2),
    "compiled operators, ulysses": replace(JOB, kernels="fused", **ULYSSES),
    "LoRA": WITH_LORA,
    "LoRA, tp2, ulysses": replace(WITH_LORA, layout=Layout(tensor=2, context=2), **ULYSSES),
    "prefix": PREFIX,
    "prefix, documents, recomputed attention": replace(
        PREFIX, documents=True, recompute=Recompute("selective"), dropout=Dropout(attention=0.2)
    ),
    "prefix, ulysses, key-value heads repeated": replace(
        PREFIX, shape=replace(FEW_KEYS, adapter=PREFIX.shape.adapter), **FOUR, **ULYSSES
    ),
    "preferences": replace(PLAIN, objective=Preference(beta=2.0), micro_batch_size=2),
    "preferences, ipo, LoRA, zbv": replace(
        WITH_LORA,
        documents=False,
        layout=Layout(pipeline=2, context=2),
        schedule="zbv",
        chunks_per_stage=2,
        objective=Preference(beta=0.5, kind="ipo"),
        micro_batch_size=2,
    ),
    "loss in chunks": replace(PLAIN, chunked_loss=5, documents=True),
}
CORE = (
    "gather",
    "ulysses",
    "4 ranks, ulysses, key-value heads repeated",
    "tp2, sequence",
    "zbv, recompute",
    "dp2, ZeRO 2",
    "soft caps, windows, documents",
    "prefix, documents, recomputed attention",
    "preferences",
)
ALONE: dict[str, Any] = {
    "layout": Layout(),
    "schedule": "1f1b",
    "chunks_per_stage": 1,
    "zero_stage": 0,
    "sequence_parallel": False,
    "context_method": "gather",
    "recompute": Recompute(),
    "kernels": "reference",
    "chunked_loss": 0,
}


def train_with_fault(job: Job, fault: str | None) -> RankResult:
    with planted_context_fault(fault):
        return train_on_rank(job)


@pytest.fixture(scope="module")
def reference(ranks):
    """The same job in one process, computed once."""

    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return run


def _compare(ranks, reference, job: Job, fault: str | None = None) -> None:
    results = ranks.run(train_with_fault, world_size=job.layout.world_size, job=job, fault=fault)
    # Far below the bar of other layouts: a bool mask times a Python float is float32, an error of 1e-11.
    rtol = ZERO_RTOL if job.zero_stage else OPERATOR_RTOL
    _assert_equal_to_one_process(job, results, reference(replace(job, **ALONE)), rtol)


@pytest.mark.parametrize("name", cases(JOBS, core=CORE))
def test_ranks_that_share_sequences_equal_one_process(ranks, reference, name):
    _compare(ranks, reference, JOBS[name])


@exhibit(
    "trl PR#6843",
    also=("Megatron-LM#1131",),
    subject="layouts",
    there="with context parallelism packed documents saw each other",
    here="a document sees itself alone, on any number of ranks",
    fault="documents ignored off the diagonal",
    case="documents ignored off the diagonal",
)
@exhibit(
    "Megatron-LM#673",
    subject="layouts",
    there="with context parallelism the loss was scaled by the number of context ranks",
    here="a token counts once, whatever number of ranks share its sequence",
    fault="tokens counted by every context rank",
    case="tokens counted by every context rank",
)
@exhibit(
    "Megatron-LM#1464",
    subject="layouts",
    there="with context parallelism gradients were wrong by more than their own size",
    here="gradients of ranks that share a sequence are those of one process",
    fault="gradients summed over dp only",
    case="gradients summed over dp only",
)
@pytest.mark.parametrize("name", cases(CONTEXT_FAULTS, core=list(CONTEXT_FAULTS)[::3]))
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    job = replace(JOB, **CONTEXT_FAULTS[name].changes)
    with pytest.raises(AssertionError) as departed:
        _compare(ranks, reference, job, name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
