"""Training, validation and generation hang with no sharing of hardware queues, by what they issue to streams.

The stand-in runs them over gloo, which waits for no receive; a model of the queues says what a GPU would do.
"""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megalite.generation.request import GREEDY, Request
from megalite.generation.token_engine import TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.model.stages import build_replica
from megalite.parallel import pipeline
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.objective import Preference
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from megalite.topology.stages import pipeline_split
from megalite.topology.transfers import StageProgram, stage_programs
from tests.support.hardware_queues import Command, Meeting, hung, one_queue, own_queues, posted_ahead
from tests.support.issued import recorded
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, batches, build, train_on_rank

TWO_CHUNKS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
LAYOUTS = {
    "pp": Layout(pipeline=2),
    "pp, dp": Layout(pipeline=2, data=2),
    "pp, tp": Layout(pipeline=2, tensor=2),
}
FOUR_STAGES = Job(tiny_shape(tied=True), layout=Layout(pipeline=4, data=2), zero_stage=1, steps=2)
VALIDATED = {
    "text": FOUR_STAGES,
    # Its reference is computed before each step. A micro batch has pairs.
    "preferences": replace(
        FOUR_STAGES,
        layout=Layout(pipeline=4),
        micro_batch_size=2,
        shape=replace(FOUR_STAGES.shape, adapter=Lora(3, 6.0, ("q_proj",))),
        objective=Preference(),
    ),
    "two chunks": replace(
        FOUR_STAGES, shape=tiny_shape(tied=True, layers=8), schedule="zbv", chunks_per_stage=2
    ),
}


def issued_on_rank(job: Job, ahead: int | None) -> list[Command]:
    """Return what this rank issues in a step. ahead: the receives that each stage posts ahead; None: as it should."""

    def programs(*arguments: Any) -> list[StageProgram]:
        stages = enumerate(stage_programs(*arguments))
        return [posted_ahead(program, stage, ahead or 0) for stage, program in stages]

    chosen = stage_programs if ahead is None else programs
    with mock.patch.object(pipeline, "stage_programs", chosen), recorded() as issued:
        train_on_rank(job)
    return issued.commands


def trained_and_validated(job: Job) -> list[Command]:
    """Return what this rank issues in steps with an evaluation behind each."""
    with recorded() as issued:
        parts = build(job)
        for batch in batches(job, parts):
            parts.accumulate(batch)
            parts.update(job.learning_rate)
            before = len(issued.commands)
            parts.pipeline.evaluate(batch)
            assert operators_in_groups([issued.commands[before:]])[0] >= {"message", "all_reduce"}
    return issued.commands


def generated(layout: Layout) -> list[Command]:
    """Return what this rank issues while a table of requests for each stage is under way."""
    with recorded() as issued:
        mesh = ParallelMesh.over_world(layout, local_device(dist.get_rank(), layout.world_size))
        split = pipeline_split(4, layout.pipeline)
        engine = TokenEngine(build_replica(tiny_shape(tied=True), mesh, split, seed=5), CacheSize(6, 32))
        for number in range(6):
            engine.submit(number, Request((3, 5 + number, 7), 2 + number, GREEDY, frozenset()))
        while engine.has_work:
            engine.step()
    return issued.commands


def operators_in_groups(commands: list[list[Command]]) -> tuple[set[str], set[str]]:
    """Return the operators that all ranks issue, and the names of their groups."""
    meetings = [command.of for each in commands for command in each if isinstance(command.of, Meeting)]
    operators, _, groups = zip(*(meeting.name.partition(" in ") for meeting in meetings), strict=True)
    return {*operators}, {*groups}


def assert_hangs_nowhere(commands: list[list[Command]]) -> None:
    assert not hung(commands, own_queues)
    assert not hung(commands, one_queue)
    assert not hung(commands, one_queue, one_by_one=True)


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=["pp, dp"]))
@pytest.mark.parametrize("name", cases(SCHEDULES, core=["1f1b"]))
def test_a_step_hangs_with_no_sharing_of_queues(devices, name: str, layout: str) -> None:
    job = Job(tiny_shape(), layout=LAYOUTS[layout], schedule=name, chunks_per_stage=1 + (name in TWO_CHUNKS))
    run = partial(devices.run, issued_on_rank, job.layout.world_size, job=job)
    commands = run(ahead=None)
    _, groups = operators_in_groups(commands)
    assert len(groups) >= (2 if layout == "pp" else 3)
    assert_hangs_nowhere(commands)
    assert hung(run(ahead=2), one_queue), "the model sees what the stages issue"


@pytest.mark.parametrize("job", cases(VALIDATED, core=["preferences"]))
def test_validation_between_steps_hangs_with_no_sharing_of_queues(devices, job: str) -> None:
    layout = VALIDATED[job].layout
    commands = devices.run(trained_and_validated, layout.world_size, job=VALIDATED[job])
    operators, groups = operators_in_groups(commands)
    assert layout.data == 1 or "all_gather_into_tensor" in operators, "the weights that ZeRO gathers"
    assert len(groups) >= 4
    assert_hangs_nowhere(commands)


@pytest.mark.parametrize(
    "layout", cases([Layout(pipeline=4), Layout(pipeline=2, tensor=2)], core=[Layout(pipeline=4)])
)
def test_generation_hangs_with_no_sharing_of_queues(devices, layout: Layout) -> None:
    commands = devices.run(generated, layout.world_size, layout=layout)
    assert operators_in_groups(commands)[0] >= {"message", "broadcast"}
    assert_hangs_nowhere(commands)
