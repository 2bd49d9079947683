"""The transfers of every schedule: each message is made once, received once, in the order of its sends, and freed."""

from collections import defaultdict
from collections.abc import Hashable
from functools import cache
from itertools import product

import pytest

from megalite.topology.schedule_timeline import in_flight_chunks, orders_of
from megalite.topology.schedules import SCHEDULES, WEIGHT
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import (
    ACTIONS_AHEAD,
    Message,
    ScheduledAction,
    StageProgram,
    Transfer,
    stage_programs,
)
from tests.support.hardware_queues import (
    COMPUTES,
    commands_of,
    hung,
    one_queue,
    own_queues,
    posted_ahead,
    stream_between,
)
from tests.support.selection import cases

Size = tuple[str, int, int, int]


def sizes(stages: tuple[int, ...], micro_batches: tuple[int, ...]) -> list[Size]:
    return [
        (name, *size)
        for name, schedule in SCHEDULES.items()
        for size in product(stages, micro_batches, (1, 2, 3))
        if schedule.takes_chunks(size[2]) and schedule.problem(*size) is None
    ]


SIZES = sizes((2, 3, 4, 8), (1, 2, 4, 8, 11, 24))


@cache
def programs_of(
    name: str, stages: int, micro_batches: int, chunks: int
) -> tuple[PipelineSplit, list[StageProgram]]:
    layers = tuple(range(index, index + 1) for index in range(stages * chunks))
    split = PipelineSplit(layers, stages, SCHEDULES[name].v_shaped)
    return split, stage_programs(orders_of(name, stages, micro_batches, chunks), split)


def scheduled(program: StageProgram) -> list[ScheduledAction]:
    return [step for step in program if isinstance(step, ScheduledAction)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_receives_what_the_others_send_it_in_their_order(name: str) -> None:
    for size in (each for each in SIZES if each[0] == name):
        split, programs = programs_of(*size)
        made: set[Message] = set()
        sent, received = defaultdict(list), defaultdict(list)
        for stage, program in enumerate(programs):
            for step in program:
                if isinstance(step, ScheduledAction):
                    made |= {step.gives} - {None}
                    continue
                assert stage in (step.source, step.target) and step.source != step.target
                if step.source == stage:
                    assert step.message in made, (size, step)
                    made.remove(step.message)
                (sent if step.source == stage else received)[step.source, step.target].append(step.message)
        assert received == sent and len(sent) >= size[1] - 1, size
        # The others are for the next chunk on the same stage.
        assert all(
            split.stage_of(each.chunk) == split.stage_of(each.chunk - 1) for each in made if each.kind == "F"
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_has_its_message_and_few_wait_for_theirs(name: str) -> None:
    for size in (each for each in SIZES if each[0] == name):
        split, programs = programs_of(*size)
        last = len(split.layers) - 1
        for stage, program in enumerate(programs):
            here, started, most = set(), set(), 0
            for step in program:
                if isinstance(step, Transfer):
                    started |= {step.message} if step.target == stage else set()
                    most = max(most, len(started))
                    continue
                action = step.action
                end = 0 if action.kind == "F" else last
                wants = action.kind != WEIGHT and action.chunk != end
                kind = "F" if action.kind == "F" else "B"
                assert step.needs == (Message(kind, action.chunk, action.micro_batch) if wants else None)
                if step.needs is not None:
                    (here if step.needs in here else started).remove(step.needs)
                if step.gives is not None:
                    here.add(step.gives)
            assert not started
            assert most <= 1 + ACTIONS_AHEAD, (size, stage, most)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sent_message_is_freed_when_its_answer_shows_that_it_was_used(name: str) -> None:
    """Simulated: what counts as arrived was used before the answer was made; never more wait than are in flight."""
    for size in (each for each in SIZES if each[0] == name):
        split, programs = programs_of(*size)
        plans = [scheduled(program) for program in programs]
        order = {(stage, each.needs): at for stage, plan in enumerate(plans) for at, each in enumerate(plan)}
        made = {each.gives: at for plan in plans for at, each in enumerate(plan) if each.gives}
        peak = max(in_flight_chunks([each.action for each in plan]) for plan in plans)
        freed = 0
        for stage, program in enumerate(programs):
            waiting: set[Message] = set()
            most = 0
            for step in program:
                if isinstance(step, Transfer):
                    waiting |= {step.message} if step.source == stage else set()
                    most = max(most, len(waiting))
                    continue
                for message in step.arrived:
                    waiting.remove(message)
                    target = split.stage_of(message.chunk)
                    assert step.needs is not None and order[target, message] <= made[step.needs]
                    freed += 1
            # One more is sent while the answer to the last is on its way.
            assert most <= peak + 1, (size, stage)
        assert freed or size[2] == 1 or name in ("gpipe", "looped_bfs")


def hung_in(size: Size) -> list[str]:
    """Return the ways to run a size's programs in which stages wait for each other for ever."""
    issued = [commands_of(program, stage) for stage, program in enumerate(programs_of(*size)[1])]
    ways = {
        "each stream has a queue": hung(issued, own_queues),
        "all streams share one": hung(issued, one_queue),
        "one command after another": hung(issued, one_queue, one_by_one=True),
    }
    return [way for way, standing in ways.items() if standing]


@pytest.mark.parametrize(
    ("name", "most_stages"), cases(product(SCHEDULES, (4, 16)), core=lambda case: case[1] == 4)
)
def test_no_sharing_of_hardware_queues_hangs(name: str, most_stages: int) -> None:
    """A sharing holds back no command that one queue for all streams lets run: that is the strictest one."""
    stages = (2, 3, 4) if most_stages == 4 else (2, 3, 4, 8, 16)
    micro_batches = (4, 8) if most_stages == 4 else (1, 2, 4, 8, 11, 16, 32)
    tried = [size for size in sizes(stages, micro_batches) if size[0] == name]
    assert max(size[1] for size in tried) == most_stages
    assert {size: ways for size in tried if (ways := hung_in(size))} == {}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_model_finds_the_hang_of_receives_that_are_posted_ahead(name: str) -> None:
    size = next(each for each in SIZES if each[:3] == (name, 4, 8))
    programs = [posted_ahead(program, stage, 2) for stage, program in enumerate(programs_of(*size)[1])]
    issued = [commands_of(program, stage) for stage, program in enumerate(programs)]
    assert not hung(issued, own_queues)
    assert {*hung(issued, one_queue)} == {*range(4)}

    def shared(rank: int, stream: Hashable) -> Hashable:
        """The computing stream shares a queue with what comes from the next stage."""
        return COMPUTES if stream == stream_between(rank + 1, rank) else stream

    assert hung(issued, shared)
