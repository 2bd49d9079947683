"""Mixtures of experts train to the numbers of one process: loss, norm, every gradient and the weights after."""

from dataclasses import fields, replace
from typing import Any

import pytest

from megalite.config.sections.schema import OptimizerConfig
from megalite.parallel.objective import Preference
from megalite.topology.adapter import PROJECTIONS, Lora
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, MixtureShape
from megalite.topology.shape import ModelShape
from megalite.train.optimizer.settings import OptimizerSettings
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.context_faults import planted_context_fault
from tests.support.expert_faults import EXPERT_FAULTS
from tests.support.museum import exhibit
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, OPERATOR_RTOL, about
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, RankResult, train_on_rank

# Seven experts, which no number of ranks divides; with small weights the router's errors would hide.
DENSE = {
    field.name: getattr(replace(tiny_shape(), initializer_range=0.2), field.name)
    for field in fields(ModelShape)
}
SHAPE = MixtureShape(**DENSE, experts=ExpertShape(7, 2, 22, first_k_dense_replace=1))
DEEPSEEK = ExpertShape(
    *(8, 3, 22, 20),
    router_scores="sigmoid",
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    decoder_sparse_step=2,
)
JOB = Job(SHAPE, router_balance=0.3, router_z=0.05, steps=2)
MUON = OptimizerSettings(OptimizerConfig(name="muon", gradient_clipping=0.5))
WITH_SHARED = replace(JOB, shape=MixtureShape(**DENSE, experts=DEEPSEEK))
NOT_NORMALISED = MixtureShape(**DENSE, experts=ExpertShape(7, 3, 22, norm_topk_prob=False))
DROPPED: dict[str, Any] = {"documents": True, "dropout": Dropout(embedding=0.1, residual=0.2, attention=0.25)}
WHOLE: dict[str, Any] = {"sequence_parallel": True}


def _stages(schedule: str, chunks: int = 2) -> dict[str, Any]:
    return {"schedule": schedule, "chunks_per_stage": chunks}


JOBS = {
    "dp2": replace(JOB, layout=Layout(data=2)),
    "dp2 ep2": replace(JOB, layout=Layout(data=2, expert=2)),
    "dp4 ep2": replace(JOB, layout=Layout(data=4, expert=2)),
    "dp4 ep4": replace(JOB, layout=Layout(data=4, expert=4)),
    "pp2 dp2 ep2": replace(JOB, layout=Layout(pipeline=2, data=2, expert=2)),
    "pp2 dp2 ep2, zbv": replace(JOB, layout=Layout(pipeline=2, data=2, expert=2), **_stages("zbv")),
    "pp2 dp2 ep2, dualpipev, recompute": replace(
        JOB,
        layout=Layout(pipeline=2, data=2, expert=2),
        recompute=Recompute("full"),
        **_stages("dualpipev"),
        **DROPPED,
    ),
    "pp2 dp2 ep2, interleaved zero bubble": replace(
        JOB, layout=Layout(pipeline=2, data=2, expert=2), **_stages("interleaved_zero_bubble")
    ),
    "cp2 ep2": replace(JOB, layout=Layout(context=2, expert=2)),
    "cp2 dp2 ep4, documents, dropout": replace(JOB, layout=Layout(context=2, data=2, expert=4), **DROPPED),
    "tp2, cut": replace(JOB, layout=Layout(tensor=2)),
    "tp2, cut, sequence": replace(JOB, layout=Layout(tensor=2), sequence_parallel=True),
    "tp2, whole": replace(JOB, layout=Layout(tensor=2, expert_tensor=1), **WHOLE),
    "tp2 ep2, whole": replace(JOB, layout=Layout(tensor=2, expert=2, expert_tensor=1), **WHOLE),
    "tp2 dp2 ep2, cut": replace(JOB, layout=Layout(tensor=2, data=2, expert=2)),
    "tp2 dp2 ep2, cut, sequence": replace(JOB, layout=Layout(tensor=2, data=2, expert=2), **WHOLE),
    "tp2 dp2 ep4, whole": replace(JOB, layout=Layout(tensor=2, data=2, expert=4, expert_tensor=1), **WHOLE),
    "tp2 cp2 ep2, cut, sequence": replace(
        JOB, layout=Layout(tensor=2, context=2, expert=2), **WHOLE, **DROPPED
    ),
    "sigmoid, groups, shared: dp2 ep2": replace(WITH_SHARED, layout=Layout(data=2, expert=2)),
    "sigmoid, groups, shared: tp2, cut": replace(WITH_SHARED, layout=Layout(tensor=2)),
    "sigmoid, groups, shared: tp2 ep2, whole": replace(
        WITH_SHARED, layout=Layout(tensor=2, expert=2, expert_tensor=1), **WHOLE
    ),
    "not normalised: dp2 ep2": replace(JOB, shape=NOT_NORMALISED, layout=Layout(data=2, expert=2)),
    "larger micro batches, recompute": replace(
        JOB, layout=Layout(data=2, expert=2), micro_batch_size=4, recompute=Recompute("full"), **DROPPED
    ),
    "recomputed attention": replace(JOB, layout=Layout(data=2, expert=2), recompute=Recompute("selective")),
    "compiled operators": replace(WITH_SHARED, layout=Layout(data=2, expert=2), kernels="fused"),
    "ulysses": replace(JOB, layout=Layout(context=2, expert=2), context_method="ulysses"),
    "LoRA of attention": replace(
        JOB,
        shape=replace(SHAPE, adapter=Lora(3, 6.0, ("q_proj", "v_proj", "o_proj"))),
        layout=Layout(data=2, expert=2),
    ),
    "Muon": replace(JOB, layout=Layout(tensor=2, data=2, expert=2), optimizer=MUON),
    "preferences": replace(
        WITH_SHARED, layout=Layout(data=2, expert=2), objective=Preference(beta=2.0), micro_batch_size=2
    ),
    "ring": replace(JOB, layout=Layout(context=2, expert=2), context_method="ring"),
}
# Low-rank adapters of every linear, those of each expert among them, and of gates alone.
ADAPTED = {"all": Lora(3, 6.0, PROJECTIONS), "gates": Lora(4, 2.0, ("*.experts.*.gate_proj",), rslora=True)}
JOBS |= {
    f"LoRA, {targets}: {name}": replace(
        JOBS[name], shape=replace(JOBS[name].shape, adapter=ADAPTED[targets]), steps=3
    )
    for targets, names in {
        "all": (
            *("dp4 ep2", "tp2, cut", "tp2, whole", "tp2 dp2 ep2, cut, sequence", "Muon"),
            *("cp2 dp2 ep4, documents, dropout", "pp2 dp2 ep2, dualpipev, recompute"),
            *(
                "pp2 dp2 ep2, interleaved zero bubble",
                "sigmoid, groups, shared: tp2 ep2, whole",
                "preferences",
            ),
        ),
        "gates": ("tp2 dp2 ep2, cut", "pp2 dp2 ep2, zbv"),
    }.items()
    for name in names
}
CORE = (
    "dp2 ep2",
    "LoRA, all: tp2 dp2 ep2, cut, sequence",
    "LoRA, all: pp2 dp2 ep2, dualpipev, recompute",
    "pp2 dp2 ep2, zbv",
    "pp2 dp2 ep2, dualpipev, recompute",
    "cp2 dp2 ep4, documents, dropout",
    "tp2, cut",
    "tp2 dp2 ep2, cut, sequence",
    "tp2 dp2 ep4, whole",
    "sigmoid, groups, shared: tp2 ep2, whole",
)
ALONE: dict[str, Any] = {
    "layout": Layout(),
    "schedule": "1f1b",
    "chunks_per_stage": 1,
    "sequence_parallel": False,
    "context_method": "gather",
    "recompute": Recompute(),
    "kernels": "reference",
}


def train_with_fault(job: Job, fault: str | None) -> RankResult:
    with planted_context_fault(fault, EXPERT_FAULTS):
        return train_on_rank(job)


def _compare(ranks, reference, job: Job, fault: str | None = None) -> None:
    results = ranks.run(train_with_fault, world_size=job.layout.world_size, job=job, fault=fault)
    alone = reference(replace(job, **ALONE))
    # The update of AdamW, which Muon leaves the other weights to, divides a gradient by its own size.
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL if job.optimizer == MUON else OPERATOR_RTOL)
    for result in results:
        assert result.loads == [about(load, OPERATOR_RTOL) for load in alone.loads]


@pytest.mark.parametrize("name", cases(tuple(JOBS), core=CORE))
def test_experts_equal_one_process(ranks, reference, name):
    _compare(ranks, reference, JOBS[name])


# The layouts of one curve: biases that move by a tenth a step change choices from the second step on.
BIASED = replace(
    JOB,
    shape=MixtureShape(**DENSE, experts=replace(DEEPSEEK, correction_bias=True)),
    router_bias_rate=0.1,
    steps=4,
)
CURVES = {
    "dp2 ep2": {"layout": Layout(data=2, expert=2)},
    "dp4 ep4": {"layout": Layout(data=4, expert=4)},
    "tp2": {"layout": Layout(tensor=2)},
    "tp2, sequence": {"layout": Layout(tensor=2), **WHOLE},
    "tp2 ep2, whole": {"layout": Layout(tensor=2, expert=2, expert_tensor=1), **WHOLE},
    "cp2 ep2": {"layout": Layout(context=2, expert=2)},
    "pp2": {"layout": Layout(pipeline=2), **_stages("zbv")},
    "dp2 ep2, recompute": {"layout": Layout(data=2, expert=2), "recompute": Recompute("full")},
    "tp2, padded": {"layout": Layout(tensor=2), "padded": True},
    "tp2 ep2, whole, padded": {
        "layout": Layout(tensor=2, expert=2, expert_tensor=1),
        "padded": True,
        **WHOLE,
    },
    "cp2 dp2 ep4, padded": {"layout": Layout(context=2, data=2, expert=4), "padded": True},
    "pp2, padded": {"layout": Layout(pipeline=2), "padded": True, "recompute": Recompute("full")},
}


@pytest.mark.parametrize(
    "name", cases(tuple(CURVES), core=("tp2", "dp2 ep2, recompute", "cp2 dp2 ep4, padded"))
)
def test_biases_and_loads_follow_one_curve(ranks, reference, name):
    job = replace(BIASED, **CURVES[name])
    _compare(ranks, reference, job)
    loads = [load["expert_load"] for load in reference(replace(job, **ALONE)).loads]
    assert len(set(loads)) > 1, "no bias changed a choice"


@exhibit(
    "Megatron-LM#5916",
    subject="gradients",
    there="the norm left out a part of the experts where they were divided over ranks",
    here="each expert counts once in the norm",
    fault="norm without the experts of other ranks",
    case="norm without the experts of other ranks",
)
@pytest.mark.parametrize("name", cases(tuple(EXPERT_FAULTS), core=tuple(EXPERT_FAULTS)[::4]))
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    changes = dict(EXPERT_FAULTS[name].changes)
    eight = changes.pop("even", False) | changes.pop("shared", False)
    adapted = changes.pop("adapted", False)
    job = replace(WITH_SHARED if eight else JOB, **changes)
    if adapted:
        job = replace(job, shape=replace(job.shape, adapter=ADAPTED["all"]))
    with pytest.raises(AssertionError) as departed:
        _compare(ranks, reference, job, name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
