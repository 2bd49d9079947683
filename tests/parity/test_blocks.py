"""Arrangements of a layer's blocks, full query-key norms, factors, partial and absent rotary angles, and a biased head
have the numbers of one process in every kind of layout."""

from dataclasses import replace

import pytest

from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.kernels import needs_library
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, train_on_rank

BASE = replace(tiny_shape(), head_dim=8)
GPT_LIKE = {"norm": "layer_norm", "gated_mlp": False, "hidden_act": "gelu"}
OUTPUT = replace(BASE, norm_placement="output", qk_norm="full")
PARALLEL = replace(BASE, norm_placement="parallel", partial_rotary_factor=0.5, mlp_bias=True, **GPT_LIKE)
SHARED = replace(
    BASE,
    norm_placement="parallel_shared",
    partial_rotary_factor=0.5,
    head_bias=True,
    mlp_bias=True,
    **GPT_LIKE,
)
SCALED = replace(
    BASE,
    embedding_multiplier=6.0,
    residual_multiplier=0.3,
    logits_scaling=4.0,
    attention_multiplier=0.2,
    no_rope_every=2,
)
# One key-value head that all ranks of tp share, normalised with weights around zero.
SHARED_HEAD = replace(OUTPUT, num_key_value_heads=1, zero_centered_gamma=True)
EVERY_SITE = Dropout(0.1, 0.1, 0.1, 0.1)
ZBV = {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2}
TP2 = {"layout": Layout(tensor=2)}
SEQUENCE = {**TP2, "sequence_parallel": True}

ROWS = {
    "output, tp 4": Job(OUTPUT, Layout(tensor=4), steps=2),
    "output, sequence": Job(OUTPUT, **SEQUENCE, steps=2),
    "output, shared head, tp 4": Job(SHARED_HEAD, Layout(tensor=4), steps=2),
    "output, shared head, tp 2 and zbv": Job(
        SHARED_HEAD, Layout(tensor=2, pipeline=2), schedule="zbv", chunks_per_stage=2, steps=2
    ),
    "output, dropout, recompute": Job(OUTPUT, **SEQUENCE, dropout=EVERY_SITE, recompute=Recompute("full")),
    "parallel, sequence": Job(PARALLEL, **SEQUENCE, dropout=EVERY_SITE),
    "parallel, zbv": Job(PARALLEL, **ZBV, steps=2),
    "parallel shared, tp 4": Job(SHARED, Layout(tensor=4), steps=2),
    "parallel shared, zbv, recompute": Job(SHARED, **ZBV, recompute=Recompute("selective"), steps=2),
    "parallel shared, chunked loss": Job(
        SHARED, **SEQUENCE, chunked_loss=7, label_smoothing=0.1, z_loss=0.01
    ),
    "scaled, pipeline": Job(SCALED, Layout(pipeline=2), steps=2),
    "scaled, tp 2, dropout": Job(SCALED, **SEQUENCE, dropout=EVERY_SITE, recompute=Recompute("selective")),
    "scaled, zbv, chunked loss": Job(SCALED, **ZBV, chunked_loss=7),
}


# Each form of a block once, and each of tensor, pipeline and sequence parallelism, dropout and recompute.
CORE = {
    "output, shared head, tp 2 and zbv",
    "output, dropout, recompute",
    "parallel, sequence",
    "parallel shared, zbv, recompute",
    "scaled, tp 2, dropout",
}


def _alone(job: Job) -> Job:
    """The same computation in one process, with nothing recomputed and all logits at once."""
    plain = {"schedule": "1f1b", "chunks_per_stage": 1, "sequence_parallel": False, "chunked_loss": 0}
    return replace(job, layout=Layout(), recompute=Recompute(), kernels="reference", **plain)


@pytest.mark.parametrize("name", cases(ROWS, core=CORE))
def test_a_layout_has_the_numbers_of_one_process(ranks, reference, name):
    job = ROWS[name]
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, reference(_alone(job)), LAYOUT_RTOL)


@needs_library
@pytest.mark.parametrize(
    "shape", [OUTPUT, PARALLEL, SHARED, SCALED], ids=["output", "parallel", "shared", "scaled"]
)
@pytest.mark.parametrize("split", [False, True], ids=["1f1b", "zbv"])
def test_compiled_operators_have_the_numbers_of_plain_torch(ranks, reference, shape, split):
    job = Job(shape, **(ZBV if split else TP2), kernels="fused")
    results = ranks.run(train_on_rank, world_size=job.layout.world_size, job=job)
    _assert_equal_to_one_process(job, results, reference(_alone(job)), LAYOUT_RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [OUTPUT, PARALLEL, SCALED], ids=["output", "parallel", "scaled"])
def test_compiled_layers_have_the_numbers_of_plain_ones(ranks, reference, shape):
    job = Job(shape, compile=True)
    results = ranks.run(train_on_rank, world_size=1, job=job)
    _assert_equal_to_one_process(job, results, reference(replace(job, compile=False)), LAYOUT_RTOL)
