"""Gemma in everything that computes otherwise for it: its norms, caps and windows under each option of a run."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megalite.generate.engine import LoadedModel, generate
from megalite.model.options import Dropout, Recompute
from megalite.topology.layout import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL
from tests.support.tiny import FAMILY_SHAPES
from tests.support.training import Job, train_on_rank
from tests.unit.checkpoint.exporting import lively_stage, our_logits

JOB = Job(FAMILY_SHAPES["gemma2"], steps=2)
DROPOUT = Dropout(embedding=0.1, residual=0.2, mlp=0.1, attention=0.2)
FUSED = {"kernels": "fused"}


@pytest.fixture(scope="module")
def reference(ranks):
    """The job in one process and plain torch, computed once."""

    @cache
    def run(job: Job):
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return run


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param(
            Layout(tensor=2), {"sequence_parallel": True, "dropout": DROPOUT}, id="sequence parallel"
        ),
        pytest.param(
            Layout(tensor=2), {"chunked_loss": 5, "documents": True}, id="loss in chunks, documents"
        ),
        pytest.param(Layout(pipeline=2), {"schedule": "zbv", "chunks_a_stage": 2}, id="split backward"),
        pytest.param(Layout(data=2), {"zero_stage": 3}, id="ZeRO 3"),
        pytest.param(
            Layout(),
            {"recompute": Recompute("selective"), "documents": True, **FUSED},
            marks=needs_library,
            id="fused",
        ),
        pytest.param(
            Layout(),
            {"recompute": Recompute("full"), "dropout": DROPOUT, **FUSED},
            marks=needs_library,
            id="full",
        ),
        pytest.param(
            Layout(pipeline=2),
            {
                "schedule": "zbv",
                "chunks_a_stage": 2,
                "recompute": Recompute("full"),
                "chunked_loss": 7,
                **FUSED,
            },
            marks=needs_library,
            id="split backward, fused",
        ),
    ],
)
def test_every_option_gives_the_numbers_of_plain_torch(ranks, reference, layout, changes):
    job = replace(JOB, layout=layout, **changes)
    alone = reference(replace(JOB, dropout=job.dropout, documents=job.documents))
    results = ranks.run(train_on_rank, world_size=layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, alone, ZERO_RTOL if job.zero_stage else LAYOUT_RTOL)


def test_tokens_from_the_cache_are_those_of_the_whole_sequence():
    """Greedy, beyond the window, so that a layer without one sees what the others no longer do."""
    stage = lively_stage(JOB.shape, scale=12.0).eval()
    ids = [5, 6, 7]
    new = list(generate(LoadedModel.whole(stage), ids, new_tokens=12))
    whole = our_logits(stage, torch.tensor([ids + new]))
    assert new == whole[0, len(ids) - 1 : -1].argmax(dim=-1).tolist()
    assert len(set(new)) > 3, "a model that repeats itself would hide a broken cache"
    assert whole.abs().max() <= JOB.shape.final_logit_softcapping
