"""What the executor really does on each stage is what the schedule says as data."""

import pytest
import torch
from torch import Tensor

from megalite.model.stages import build_stage
from megalite.parallel import pipeline
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineShapes, pipeline_runner
from megalite.topology.layout import Layout, pipeline_split
from megalite.topology.schedules import SCHEDULES, Action
from tests.support.tiny import tiny_batch, tiny_shape

SHAPE = tiny_shape(tied=True)


def actions_on_rank(schedule: str, stages: int, micro_batches: int) -> list[Action]:
    mesh = ParallelMesh.over_world(Layout(pipeline=stages))
    split = pipeline_split(SHAPE.num_hidden_layers, stages)
    stage = build_stage(SHAPE, mesh, split, seed=0)
    actions: list[Action] = []

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        micro_batch = sum(action.kind == "F" for action in actions)
        actions.append(Action("F", micro_batch))
        output.register_hook(lambda grad: actions.append(Action("B", micro_batch)))

    stage.whole.register_forward_hook(record)
    shapes = PipelineShapes(micro_batches, SHAPE.hidden_size, torch.float32, torch.float32)
    batch = tiny_batch(SHAPE, micro_batches)
    runner = pipeline_runner(stage.chunks, split, mesh, shapes, schedule=schedule)
    runner.forward_backward(batch)
    return actions


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 6)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_executed_actions_are_those_of_the_schedule(ranks, schedule, stages, micro_batches):
    if stages == 1:
        schedule = "1f1b"  # gradient accumulation is its one-stage case, whatever the name
    results = ranks.run(
        actions_on_rank, world_size=stages, schedule=schedule, stages=stages, micro_batches=micro_batches
    )
    for stage, actions in enumerate(results):
        assert tuple(actions) == SCHEDULES[schedule].order(stage, stages, micro_batches)


def test_every_schedule_has_an_executor():
    assert {*pipeline._SINGLE, *pipeline._MULTI} >= set(SCHEDULES)
