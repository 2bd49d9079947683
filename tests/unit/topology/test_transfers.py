"""The transfers of every schedule: each message is made once, received once, in the order of its sends, and freed."""

from collections import defaultdict
from itertools import product

import pytest

from megalite.topology.schedule_timeline import in_flight_chunks, orders_of
from megalite.topology.schedules import SCHEDULES, WEIGHT
from megalite.topology.stages import PipelineSplit
from megalite.topology.transfers import RECEIVES_AHEAD, Message, ScheduledAction, scheduled_actions

SIZES = [
    (name, stages, micro_batches, chunks)
    for name, schedule in SCHEDULES.items()
    for stages, micro_batches, chunks in product((2, 3, 4, 8), (1, 2, 4, 8, 11, 24), (1, 2, 3))
    if schedule.takes_chunks(chunks) and schedule.problem(stages, micro_batches, chunks) is None
]


def plans_of(
    name: str, stages: int, micro_batches: int, chunks: int
) -> tuple[PipelineSplit, list[tuple[ScheduledAction, ...]]]:
    layers = tuple(range(index, index + 1) for index in range(stages * chunks))
    split = PipelineSplit(layers, stages, SCHEDULES[name].v_shaped)
    orders = orders_of(name, stages, micro_batches, chunks)
    return split, [scheduled_actions(orders, split, stage) for stage in range(stages)]


def sends(plan: tuple[ScheduledAction, ...], stage: int) -> list[tuple[int, Message]]:
    """(target, message) of what a stage sends to others, in order."""
    given = [each.gives for each in plan if each.gives is not None]
    return [(each.stage, each.message) for each in given if each.stage != stage]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_receives_what_the_others_send_it_in_their_order(name: str) -> None:
    for size in (each for each in SIZES if each[0] == name):
        _, plans = plans_of(*size)
        sent, received = defaultdict(list), defaultdict(list)
        for stage, plan in enumerate(plans):
            for target, message in sends(plan, stage):
                sent[stage, target].append(message)
            for each in plan:
                for transfer in each.starts:
                    received[transfer.stage, stage].append(transfer.message)
        assert received == sent and len(sent) >= size[1] - 1, size


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_has_its_message_and_few_wait_for_theirs(name: str) -> None:
    for size in (each for each in SIZES if each[0] == name):
        split, plans = plans_of(*size)
        last = len(split.layers) - 1
        for stage, plan in enumerate(plans):
            here, started, most = set(), set(), 0
            for each in plan:
                action = each.action
                end = 0 if action.kind == "F" else last
                wants = action.kind != WEIGHT and action.chunk != end
                kind = "F" if action.kind == "F" else "B"
                assert each.needs == (Message(kind, action.chunk, action.micro_batch) if wants else None)
                started |= {transfer.message for transfer in each.starts}
                most = max(most, len(started))
                if each.needs is not None:
                    (here if each.needs in here else started).remove(each.needs)
                if each.gives is not None and each.gives.stage == stage:
                    here.add(each.gives.message)
            assert not here and not started
            # Besides the next ones: those that a sender sends before them, which interleaved stages use later.
            others = 0 if split.chunks_per_stage == 1 else size[2]
            assert most <= 1 + RECEIVES_AHEAD + others, (size, stage, most)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sent_message_is_freed_when_its_answer_shows_that_it_was_used(name: str) -> None:
    """Simulated: what counts as arrived was used before the answer was made; never more wait than are in flight."""
    for size in (each for each in SIZES if each[0] == name):
        split, plans = plans_of(*size)
        order = {(stage, each.needs): at for stage, plan in enumerate(plans) for at, each in enumerate(plan)}
        made = {each.gives.message: at for plan in plans for at, each in enumerate(plan) if each.gives}
        peak = max(in_flight_chunks([each.action for each in plan]) for plan in plans)
        freed = 0
        for stage, plan in enumerate(plans):
            waiting: set[Message] = set()
            most = 0
            for each in plan:
                for message in each.arrived:
                    waiting.remove(message)
                    target = split.stage_of(message.chunk)
                    assert each.needs is not None and order[target, message] <= made[each.needs]
                    freed += 1
                if each.gives is not None and each.gives.stage != stage:
                    waiting.add(each.gives.message)
                most = max(most, len(waiting))
            # One more is sent while the answer to the last is on its way.
            assert most <= peak + 1, (size, stage)
        assert freed or size[2] == 1 or name in ("gpipe", "looped_bfs")
