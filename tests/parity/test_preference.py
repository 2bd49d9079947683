"""Preference tuning equals one process in any layout, with all weights trained and with an adapter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.parallel.objective import Preference
from megalite.parallel.step_batch import WITHOUT_ADAPTER
from megalite.topology.adapter import Lora, Prefix
from megalite.topology.axes import Layout
from tests.parity.test_layouts import _assert_equal_to_one_process
from tests.support.mutations import PREFERENCE_FAULTS, planted_fault
from tests.support.options import Dropout, Recompute
from tests.support.parity import LAYOUT_RTOL, ZERO_RTOL, assert_close, relative_error
from tests.support.selection import cases
from tests.support.tiny import MIXTURE_SHAPES, tiny_shape
from tests.support.training import Job, build, local_batch, train_on_rank

# A large beta, so that the weights of the pairs differ.
SIGMOID, IPO = Preference(beta=2.0), Preference(beta=0.5, kind="ipo")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
SHAPES = {
    "full": tiny_shape(),
    "lora": replace(tiny_shape(tied=True), adapter=Lora(3, 6.0, TARGETS)),
    "dora": replace(tiny_shape(tied=True), adapter=Lora(3, 6.0, TARGETS, dora=True)),
    "prefix": replace(tiny_shape(), adapter=Prefix(3, projection=10)),
    "experts": replace(MIXTURE_SHAPES["mixtral"], adapter=Lora(3, 6.0, ("q_proj", "up_proj"))),
    "lora and head": replace(tiny_shape(), adapter=Lora(3, 6.0, TARGETS, modules_to_save=("lm_head",))),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"layout": Layout(tensor=2)},
    "pp2 zbv": {"layout": Layout(pipeline=2), "schedule": "zbv", "chunks_per_stage": 2},
    "pp2 interleaved": {
        "layout": Layout(pipeline=2),
        "schedule": "interleaved_1f1b",
        "chunks_per_stage": 2,
    },
    "dp2 ZeRO 1": {"layout": Layout(data=2), "zero_stage": 1},
    "dp2 ZeRO 2": {"layout": Layout(data=2), "zero_stage": 2},
    "dp2 ZeRO 3": {"layout": Layout(data=2), "zero_stage": 3},
    "tp2 pp2 sequence": {"layout": Layout(pipeline=2, tensor=2), "sequence_parallel": True},
    "larger micro batches": {"micro_batch_size": 4},
}
# The training that one process has too; a fault of the loss would be the same everywhere, and is for the plain loops.
TRAINED: dict[str, dict[str, Any]] = {
    "sigmoid": {"objective": SIGMOID},
    "smoothed, dropout, recompute": {
        "objective": replace(SIGMOID, label_smoothing=0.2),
        "dropout": Dropout(residual=0.2, attention=0.1, adapter=0.3),
        "recompute": Recompute("full"),
    },
    "ipo": {"objective": IPO},
    "chunked": {"objective": SIGMOID, "chunked_loss": 5},
}
SHAPES_AND_TRAINED = (
    ("full", "sigmoid"),
    ("full", "ipo"),
    ("lora", "sigmoid"),
    ("lora", "smoothed, dropout, recompute"),
    ("dora", "sigmoid"),
    ("lora and head", "sigmoid"),
    ("lora", "chunked"),
    ("prefix", "sigmoid"),
)
CORE = {
    ("tp2", "lora", "sigmoid"),
    ("pp2 zbv", "full", "sigmoid"),
    ("dp2 ZeRO 2", "full", "ipo"),
    ("tp2 pp2 sequence", "lora", "smoothed, dropout, recompute"),
    ("tp2", "lora", "chunked"),
    ("pp2 zbv", "prefix", "sigmoid"),
}


def _params():
    """Every change takes each layout with at least three of the eight trainings, and each training with three layouts.

    The pairwise table has preferences beside every value of the other axes.
    """
    for place, layout in enumerate(LAYOUTS):
        for at, (shape, trained) in enumerate(SHAPES_AND_TRAINED):
            case = (layout, shape, trained)
            every_change = (at - place) % len(LAYOUTS) in (0, 3, 5) or case in CORE
            yield case if every_change else pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(("layout", "shape", "trained"), cases(_params(), core=CORE.__contains__))
def test_any_layout_equals_one_process(ranks, reference, layout, shape, trained):
    job = Job(SHAPES[shape], micro_batch_size=2, steps=2, **TRAINED[trained])
    there = replace(job, **LAYOUTS[layout])
    # One process computes the loss over all tokens at once.
    job = replace(job, chunked_loss=0)
    results = ranks.run(train_on_rank, world_size=there.layout.world_size, job=there)
    _assert_equal_to_one_process(
        there, results, reference(job), ZERO_RTOL if there.zero_stage else LAYOUT_RTOL
    )


def rows_of_the_reference(job: Job, fault: str | None = None) -> Tensor:
    """The reference's loss of each row of the first batch, of a model whose adapter is not zero."""
    parts = build(job)
    with planted_fault(fault):
        losses = parts.pipeline.row_losses(local_batch(job, parts.mesh, 0), WITHOUT_ADAPTER)
    assert losses is not None
    return losses


@pytest.mark.parametrize("shape", ["full", "lora", "dora", "prefix", "experts"])
def test_the_reference_has_neither_dropout_nor_an_adapter(ranks, shape):
    job = Job(SHAPES[shape], micro_batch_size=2, **TRAINED["smoothed, dropout, recompute"])
    [found] = ranks.run(rows_of_the_reference, world_size=1, job=job)
    plain = Job(replace(job.shape, adapter=None), micro_batch_size=2, objective=SIGMOID)
    [expected] = ranks.run(rows_of_the_reference, world_size=1, job=plain)
    assert torch.equal(found, expected)
    assert (expected[:-2] > 0).all() and not expected[-2:].any()


@pytest.mark.parametrize("fault", PREFERENCE_FAULTS)
def test_a_planted_fault_departs_from_the_reference(ranks, fault):
    job = Job(SHAPES["lora"], micro_batch_size=2, **TRAINED["smoothed, dropout, recompute"])
    [right] = ranks.run(rows_of_the_reference, world_size=1, job=job)
    [wrong] = ranks.run(rows_of_the_reference, world_size=1, job=job, fault=fault)
    with pytest.raises(AssertionError):
        assert_close(wrong, right, rtol=LAYOUT_RTOL)
    assert relative_error(wrong, right) < 1
