"""A training step's collectives and messages, as the stand-in's streams were given them, hang with no hardware queues.

The stand-in runs them over gloo, which waits for no receive; a model of the queues says what a GPU would do.
"""

from functools import partial
from typing import Any
from unittest import mock

import pytest

from megalite.parallel import pipeline
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES
from megalite.topology.transfers import StageProgram, stage_programs
from tests.support.hardware_queues import Command, Meeting, hung, one_queue, own_queues, posted_ahead
from tests.support.issued import recorded
from tests.support.selection import cases
from tests.support.tiny import tiny_shape
from tests.support.training import Job, train_on_rank

TWO_CHUNKS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
LAYOUTS = {
    "pp": Layout(pipeline=2),
    "pp, dp": Layout(pipeline=2, data=2),
    "pp, tp": Layout(pipeline=2, tensor=2),
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


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=["pp, dp"]))
@pytest.mark.parametrize("name", cases(SCHEDULES, core=["1f1b"]))
def test_a_step_hangs_with_no_sharing_of_queues(devices, name: str, layout: str) -> None:
    job = Job(tiny_shape(), layout=LAYOUTS[layout], schedule=name, chunks_per_stage=1 + (name in TWO_CHUNKS))
    run = partial(devices.run, issued_on_rank, job.layout.world_size, job=job)
    commands = run(ahead=None)
    meetings = [command.of for each in commands for command in each if isinstance(command.of, Meeting)]
    assert len({meeting.name for meeting in meetings}) >= (2 if layout == "pp" else 3)
    assert not hung(commands, own_queues)
    assert not hung(commands, one_queue)
    assert not hung(commands, one_queue, one_by_one=True)
    assert hung(run(ahead=2), one_queue), "the model sees what the stages issue"
