"""The runner of a pipeline takes batches of several shapes, and masked rows count nothing."""

from dataclasses import replace

import pytest
import torch

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineRunner, PipelineShapes
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from megalite.topology.stages import pipeline_split
from tests.support.parity import assert_close, assert_same_tensors
from tests.support.tiny import tiny_batch, tiny_shape
from tests.support.training import whole_loss

SHAPE = tiny_shape()
MICRO_BATCHES = 4


def losses_and_gradients(
    schedule: str, stages: int, chunks: int, batches: list[StepBatch], loss_scale: float = 1.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = ParallelMesh.over_world(Layout(pipeline=stages))
    v_shaped = SCHEDULES[schedule].v_shaped
    split = pipeline_split(SHAPE.num_hidden_layers, stages, chunks_per_stage=chunks, v_shaped=v_shaped)
    stage = build_replica(SHAPE, mesh, split, ModelOptions(dtype=torch.float64), seed=0).stage
    shapes = PipelineShapes(MICRO_BATCHES, SHAPE.hidden_size, torch.float64, schedule)
    runner = PipelineRunner(stage.chunks, split, mesh, shapes)
    losses = []
    for batch in batches:
        total, weight = runner.evaluate(batch).tolist()
        losses.append(float(whole_loss(runner, batch, mesh, loss_scale)))
        # The same weights: an evaluation in between sees the same loss, and leaves no gradient.
        assert_close(total / weight, losses[-1], what="evaluated loss")
    return losses, {name: tensor.grad for name, tensor in stage.named_parameters() if tensor.grad is not None}


def double(batch: StepBatch) -> StepBatch:
    return replace(batch, loss_mask=batch.loss_mask.double())


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks"),
    [
        ("1f1b", 2, 1),
        ("gpipe", 2, 1),
        ("interleaved_1f1b", 2, 2),
        ("zbv", 2, 2),
        ("dualpipev", 2, 2),
    ],
)
def test_batches_of_other_lengths_and_sizes_run_in_one_runner(ranks, schedule, stages, chunks):
    batches = [
        double(tiny_batch(SHAPE, rows, sequence_length=length, step=step))
        for step, (rows, length) in enumerate([(8, 12), (8, 7), (4, 12), (8, 12), (8, 7)])
    ]
    [(losses, gradients)] = ranks.run(
        losses_and_gradients, world_size=1, schedule="1f1b", stages=1, chunks=1, batches=batches
    )
    results = ranks.run(
        losses_and_gradients,
        world_size=stages,
        schedule=schedule,
        stages=stages,
        chunks=chunks,
        batches=batches,
    )
    assert {name for _, held in results for name in held} == gradients.keys()
    for staged_losses, held in results:
        assert_close(staged_losses, losses, what="losses")
        assert_same_tensors(held, {name: gradients[name] for name in held})


def test_what_masked_rows_hold_changes_nothing(ranks):
    whole = double(tiny_batch(SHAPE, 8))
    counted = torch.arange(8).unsqueeze(1) < 5
    padded = replace(whole, loss_mask=torch.where(counted, whole.loss_mask, 0))
    other = replace(padded, input_ids=torch.where(counted, padded.input_ids, 0))
    one, two = (
        ranks.run(losses_and_gradients, world_size=2, schedule="1f1b", stages=2, chunks=1, batches=[batch])
        for batch in (padded, other)
    )
    for (losses, gradients), (other_losses, other_gradients) in zip(one, two, strict=True):
        assert_close(losses, other_losses, rtol=0, what="losses")
        assert_same_tensors(gradients, other_gradients)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), [("1f1b", 1, 1), ("1f1b", 2, 1), ("zbv", 2, 2)])
def test_gradients_carry_the_loss_scale_and_the_loss_does_not(ranks, schedule, stages, chunks):
    job = {
        "schedule": schedule,
        "stages": stages,
        "chunks": chunks,
        "batches": [double(tiny_batch(SHAPE, 4))],
    }
    plain, scaled = (
        ranks.run(losses_and_gradients, world_size=stages, **job, loss_scale=scale) for scale in (1.0, 1024.0)
    )
    for (losses, gradients), (scaled_losses, scaled_gradients) in zip(plain, scaled, strict=True):
        assert_close(scaled_losses, losses, rtol=0, what="losses")
        # A power of two rounds nothing.
        assert_same_tensors(scaled_gradients, {name: 1024 * grad for name, grad in gradients.items()}, rtol=0)
