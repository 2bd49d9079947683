"""Latent attention trains to the numbers of one process: loss, norm, every gradient and the weights after."""

import shutil
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megalite.checkpoint.folder import find_latest
from megalite.config.sections.schema import OptimizerConfig
from megalite.generation.request import Request
from megalite.model.transformer import Stage
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.experts import ExpertShape, LatentAttention, MixtureShape
from megalite.topology.shape import ModelShape, RopeScaling
from megalite.train.optimizer.settings import OptimizerSettings
from tests.distributed.test_zero_precision import ADAMW, contents, train_and_save
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.context_faults import planted_context_fault
from tests.support.generation import mixed_requests, tokens_on_rank
from tests.support.latent_faults import LATENT_FAULTS
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, OPERATOR_RTOL, ZERO_RTOL, assert_close, assert_same_tensors
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, RankResult, train_on_rank
from tests.unit.convert.exporting import lively_stage, save_stage

# All widths differ, and none is that of another model's head; weights large enough that scores matter.
LATENT = LatentAttention(14, 6, 4, 5, q_lora_rank=18)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9)
PLAIN = {field.name: getattr(tiny_shape(), field.name) for field in fields(ModelShape)}
PLAIN |= {"num_key_value_heads": 8, "head_dim": 10, "initializer_range": 0.2, "rope_scaling": YARN}
EXPERTS = ExpertShape(
    *(8, 3, 22, 20),
    router_scores="sigmoid",
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
)
SHAPE = MixtureShape(**PLAIN, latent=LATENT)
DEEPSEEK = replace(SHAPE, experts=EXPERTS)
ONE_QUERY_PROJECTION = replace(SHAPE, latent=replace(LATENT, q_lora_rank=None))
BIASED = replace(SHAPE, attention_bias=True, attention_output_bias=True)
NAMES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LORA = Lora(3, 6.0, NAMES)
ADAPTED = replace(SHAPE, adapter=LORA)
JOB = Job(SHAPE, steps=2)
WITH_EXPERTS = replace(JOB, shape=DEEPSEEK, router_balance=0.3)
MUON = OptimizerSettings(OptimizerConfig(name="muon", gradient_clipping=0.5))
DROPPED: dict[str, Any] = {"documents": True, "dropout": Dropout(embedding=0.1, residual=0.2, attention=0.25)}
WHOLE: dict[str, Any] = {"sequence_parallel": True}


def _stages(schedule: str) -> dict[str, Any]:
    return {"schedule": schedule, "chunks_per_stage": 2}


JOBS = {
    "tp2": replace(JOB, layout=Layout(tensor=2)),
    "tp4, biases": replace(JOB, shape=BIASED, layout=Layout(tensor=4)),
    "tp2, sequence, biases": replace(JOB, shape=BIASED, layout=Layout(tensor=2), **WHOLE),
    "tp2, sequence, one query projection": replace(
        JOB, shape=ONE_QUERY_PROJECTION, layout=Layout(tensor=2), **WHOLE
    ),
    "tp2, one query projection": replace(JOB, shape=ONE_QUERY_PROJECTION, layout=Layout(tensor=2)),
    "pp2": replace(JOB, layout=Layout(pipeline=2)),
    "tp2 pp2, sequence, zbv, documents, dropout": replace(
        JOB, layout=Layout(tensor=2, pipeline=2), **_stages("zbv"), **WHOLE, **DROPPED
    ),
    "dp2": replace(JOB, layout=Layout(data=2), **DROPPED),
    "cp2, gather": replace(JOB, layout=Layout(context=2), **DROPPED),
    "cp2, ring": replace(JOB, layout=Layout(context=2), context_method="ring", **DROPPED),
    "cp2, ulysses": replace(JOB, layout=Layout(context=2), context_method="ulysses", **DROPPED),
    "tp2 cp2, sequence, ring": replace(
        JOB, layout=Layout(tensor=2, context=2), context_method="ring", **WHOLE
    ),
    "experts: dp2 ep2": replace(WITH_EXPERTS, layout=Layout(data=2, expert=2)),
    "experts: tp2 ep2, whole, recompute": replace(
        WITH_EXPERTS,
        layout=Layout(tensor=2, expert=2, expert_tensor=1),
        recompute=Recompute("full"),
        **WHOLE,
        **DROPPED,
    ),
    "experts: cp2 pp2 ep2, zbv": replace(
        WITH_EXPERTS, layout=Layout(context=2, pipeline=2, expert=2), **_stages("zbv")
    ),
    "recompute": replace(JOB, layout=Layout(tensor=2), recompute=Recompute("full"), **DROPPED),
    "sinks": replace(JOB, shape=replace(SHAPE, attention_sinks=True), layout=Layout(tensor=2), **DROPPED),
    "recomputed attention": replace(JOB, layout=Layout(tensor=2), recompute=Recompute("selective"), **WHOLE),
    "compiled operators": replace(JOB, layout=Layout(tensor=2), kernels="fused", **DROPPED),
    "compiled operators, ring": replace(
        JOB, layout=Layout(context=2), kernels="fused", context_method="ring", **DROPPED
    ),
    "LoRA, sequence": replace(JOB, shape=ADAPTED, layout=Layout(tensor=2), **WHOLE),
    "LoRA": replace(JOB, shape=ADAPTED, layout=Layout(tensor=2, data=2)),
    "DoRA, sequence": replace(
        JOB, shape=replace(SHAPE, adapter=replace(LORA, dora=True)), layout=Layout(tensor=2, data=2), **WHOLE
    ),
    "Muon": replace(JOB, layout=Layout(tensor=2, data=2), optimizer=MUON),
    "chunks of a sequence": replace(JOB, layout=Layout(tensor=2), sequence_chunk=4, **WHOLE),
}
CORE = (
    "tp2",
    "tp2, sequence, biases",
    "tp2 pp2, sequence, zbv, documents, dropout",
    "cp2, ring",
    "experts: tp2 ep2, whole, recompute",
    "compiled operators",
)
ALONE: dict[str, Any] = {
    "layout": Layout(),
    "schedule": "1f1b",
    "chunks_per_stage": 1,
    "sequence_parallel": False,
    "context_method": "gather",
    "recompute": Recompute(),
    "kernels": "reference",
    "sequence_chunk": 0,
}


def train_with_fault(job: Job, fault: str | None) -> RankResult:
    with planted_context_fault(fault, LATENT_FAULTS):
        return train_on_rank(job)


def _compare(ranks, reference, job: Job, fault: str | None = None) -> None:
    results = ranks.run(train_with_fault, world_size=job.layout.world_size, job=job, fault=fault)
    alone = reference(replace(job, **ALONE))
    # The update of AdamW, which Muon leaves the other weights to, divides a gradient by its own size.
    _assert_equal_to_one_process(job, results, alone, LAYOUT_RTOL if job.optimizer == MUON else OPERATOR_RTOL)


@pytest.mark.parametrize("name", cases(tuple(JOBS), core=CORE))
def test_latent_attention_equals_one_process(ranks, reference, name):
    _compare(ranks, reference, JOBS[name])


ZERO = {
    "ZeRO 1": replace(JOB, zero_stage=1, layout=Layout(tensor=2, pipeline=2, data=2), **WHOLE),
    "ZeRO 2": replace(JOB, zero_stage=2, layout=Layout(tensor=2, data=2), **WHOLE),
    "ZeRO 3": replace(JOB, zero_stage=3, layout=Layout(tensor=2, data=2), **WHOLE),
    "ZeRO 3, experts": replace(WITH_EXPERTS, zero_stage=3, layout=Layout(data=2, expert=2)),
}


@pytest.mark.parametrize("name", cases(tuple(ZERO), core=("ZeRO 3",)))
def test_latent_attention_under_zero_equals_one_process(ranks, reference, name):
    job = ZERO[name]
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    alone = reference(replace(job, zero_stage=0, **ALONE))
    _assert_equal_to_one_process(job, results, alone, ZERO_RTOL)


def test_a_checkpoint_of_one_rank_goes_on_over_two(ranks, tmp_path):
    """Two ranks load what one has saved, to the last digit, and their next steps are its own."""
    job = replace(WITH_EXPERTS, optimizer=ADAMW, learning_rate=1e-3)
    wide = replace(job, layout=Layout(tensor=2), **WHOLE)

    def run(job: Job, place: str) -> list[list[float]]:
        return ranks.run(
            train_and_save, world_size=job.layout.world_size, job=job, folder=str(tmp_path / place)
        )

    run(job, "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    run(wide, "two")
    one, two = (contents(find_latest(tmp_path / place)) for place in ("one", "two"))
    assert_same_tensors(two, one, rtol=0)
    [alone] = run(replace(job, steps=4), "one")
    for losses in run(replace(wide, steps=4), "two"):
        assert_close(losses, alone, rtol=OPERATOR_RTOL, what="losses after the checkpoint")


def _greedy(stage: Stage, request: Request) -> list[int]:
    """Return the tokens without a cache: each from the whole sequence before it."""
    ids = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        positions = torch.arange(len(ids)).unsqueeze(0)
        hidden = stage.whole.decode(torch.tensor([ids]), positions)
        ids.append(int(stage.whole.logits(hidden)[0, -1].argmax()))
    return ids[len(request.prompt_ids) :]


@pytest.mark.parametrize("ranks_of_tensor", cases((1, 2, 4), core=(2,)))
def test_cached_tokens_are_those_of_whole_sequences(ranks, tmp_path, ranks_of_tensor):
    stage = lively_stage(DEEPSEEK, scale=1.0)
    checkpoint = save_stage(tmp_path, DEEPSEEK, stage)
    requests = mixed_requests(8, DEEPSEEK.vocab_size)
    with torch.no_grad():
        expected = {number: _greedy(stage, request) for number, request in enumerate(requests)}
    assert len({token for tokens in expected.values() for token in tokens}) > 5
    results = ranks.run(
        tokens_on_rank,
        world_size=ranks_of_tensor,
        checkpoint=checkpoint,
        layout=Layout(tensor=ranks_of_tensor),
        requests=requests,
        how={"slots": 3, "chunk": 7, "joining": 2},
        dtype="float64",
    )
    assert results[0] == expected


@pytest.mark.parametrize("name", cases(tuple(LATENT_FAULTS), core=tuple(LATENT_FAULTS)[:2]))
def test_a_planted_fault_departs_from_one_process(ranks, reference, name):
    job = replace(JOB, **LATENT_FAULTS[name].changes)
    with pytest.raises(AssertionError) as departed:
        _compare(ranks, reference, job, name)
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
