"""Gemma in everything that computes otherwise for it: its norms, caps and windows under each option of a run."""

from dataclasses import replace

import pytest
import torch

from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.generation import generate_ids
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.replicas import whole_replica
from tests.support.tiny import FAMILY_SHAPES
from tests.support.training import Job, train_on_rank
from tests.unit.convert.exporting import lively_stage, our_logits

JOB = Job(FAMILY_SHAPES["gemma2"], steps=2)
DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.1, attention=0.2)
FUSED = {"kernels": "fused"}
SELECTIVE, FULL = ({"recompute": Recompute(how)} for how in ("selective", "full"))


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [
        ("gemma3", Layout(tensor=2), {"sequence_parallel": True, "dropout": DROPOUT}),
        ("gemma2", Layout(tensor=2), {"chunked_loss": 5, "documents": True}),
        ("gemma2", Layout(pipeline=2), {"schedule": "zbv", "chunks_per_stage": 2}),
        ("gemma3", Layout(data=2), {"zero_stage": 3}),
        pytest.param("gemma2", Layout(), {**SELECTIVE, "documents": True, **FUSED}, marks=needs_library),
        pytest.param("gemma3", Layout(), {**FULL, "dropout": DROPOUT, **FUSED}, marks=needs_library),
        pytest.param(
            "gemma3",
            Layout(pipeline=2),
            {**FULL, "schedule": "zbv", "chunks_per_stage": 2, "chunked_loss": 7, **FUSED},
            marks=needs_library,
        ),
    ],
    ids=[
        "sequence parallel",
        "loss in chunks, documents",
        "split backward",
        "ZeRO 3",
        "fused, attention recomputed",
        "fused, layers recomputed",
        "fused, split backward",
    ],
)
def test_every_option_gives_the_numbers_of_plain_torch(ranks, reference, family, layout, changes):
    shape = FAMILY_SHAPES[family]
    job = replace(JOB, shape=shape, layout=layout, **changes)
    alone = reference(replace(JOB, shape=shape, dropout=job.dropout, documents=job.documents))
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, alone, ZERO_RTOL if job.zero_stage else LAYOUT_RTOL)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_tokens_from_the_cache_are_those_of_the_whole_sequence(family):
    """Greedy, beyond the window, so that a layer without one sees what the others no longer do."""
    stage = lively_stage(FAMILY_SHAPES[family], scale=12.0)
    ids = [5, 6, 7]
    new = list(generate_ids(whole_replica(stage), ids, new_tokens=12))
    whole = our_logits(stage, torch.tensor([ids + new]))
    assert new == whole[0, len(ids) - 1 : -1].argmax(dim=-1).tolist()
    assert len(set(new)) > 3, "a model that repeats itself would hide a broken cache"
    cap = stage.shape.final_logit_softcapping
    assert cap is None or whole.abs().max() <= cap
