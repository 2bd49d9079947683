"""The bytes that are alive at each moment of a schedule, for a chunk of round numbers."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from megalite.planner.activations import Activations
from megalite.planner.liveness import ChunkMemory, LiveState, live_states, schedule_states, stage_moments
from megalite.topology.schedule_timeline import in_flight_chunks
from megalite.topology.schedules import SCHEDULES, Action

LAYERS = Activations(kept=100, deferred=30, forward=7, backward=5)
LOSS = Activations(kept=1000, deferred=0, forward=0, backward=200)
CHUNKS = {chunk: ChunkMemory(LAYERS) for chunk in range(64)}


def order(text: str) -> list[Action]:
    """Return actions of chunk 0 from "F0 F1 B0 B1"."""
    return [Action(word[0], 0, int(word[1:])) for word in text.split()]  # type: ignore[arg-type]


def activations(text: str, memory: ChunkMemory = ChunkMemory(LAYERS)) -> list[float]:  # noqa: B008
    """Return the highest bytes of activations while each action runs."""
    moments = []
    for state in live_states(order(text)):
        moments.append(max(moment.activations for moment in stage_moments([state], {0: memory})))
    return moments


def test_a_forward_adds_and_a_backward_frees() -> None:
    assert activations("F0 F1 B0 B1") == [107, 207, 205, 105]


def test_a_split_backward_keeps_what_its_weight_half_needs() -> None:
    assert activations("F0 I0 F1 I1 W0 W1") == [107, 105, 137, 135, 60, 30]


def test_logits_are_freed_before_the_layers_run_backward() -> None:
    [forward, backward] = live_states(order("F0 B0"))
    memory = {0: ChunkMemory(LAYERS, LOSS, 50, head_gradient=20, head_product=10, waiting=3, table=4)}
    assert max(moment.total for moment in stage_moments([forward], memory)) == 100 + 1000
    moments = stage_moments([backward], memory)
    assert [(moment.activations, moment.loss, moment.gradients) for moment in moments] == [
        (100, 1200, 30),
        (105, 0, 3),
        (5, 0, 50),
        (0, 0, 54),
    ]


def test_gradients_stay_from_the_first_backward_on() -> None:
    memory = {0: ChunkMemory(LAYERS, gradients=50)}
    states = list(live_states(order("F0 B0 F1 B1")))
    assert [moment.gradients for moment in stage_moments(states[2:], memory)] == [50] * 5


def test_gradients_of_a_split_backward_come_with_its_weight_half() -> None:
    memory = {0: ChunkMemory(LAYERS, gradients=50)}
    states = list(live_states(order("F0 I0 W0 F1")))
    assert [stage_moments([state], memory)[0].gradients for state in states] == [0, 0, 0, 50]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_fullest_states_are_those_of_the_schedule(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.default_chunks
    for stage in range(4):
        actions = schedule.order(stage, 4, 8, chunks)
        states = list(live_states(actions))
        every = [moment.total for moment in stage_moments(states, _of_stage(actions))]
        fullest = [
            moment.total
            for moment in stage_moments(schedule_states(name, stage, 4, 8, chunks), _of_stage(actions))
        ]
        assert max(every) == max(fullest)
        most = max(state.alive + (state.kind == "F") for state in states)
        assert most == in_flight_chunks(actions)


def _of_stage(actions: tuple[Action, ...]) -> dict[int, ChunkMemory]:
    return {chunk: CHUNKS[chunk] for chunk in {action.chunk for action in actions}}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_states_of_repeated_rounds_are_those_of_few(name: str) -> None:
    for stages, batches in product((2, 3, 5), (11, 17, 26, 60)):
        assert_the_states_are_those_of_whole_orders(name, stages, batches)


@pytest.mark.extended
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_states_are_those_of_every_size_up_to_16_stages_and_64_micro_batches(name: str) -> None:
    for stages, batches in [*product(range(2, 17), range(1, 65)), (4, 1003), (16, 300)]:
        assert_the_states_are_those_of_whole_orders(name, stages, batches)


def assert_the_states_are_those_of_whole_orders(name: str, stages: int, batches: int) -> None:
    """The states of which no other has more are compared; a schedule that keeps all micro batches repeats no state."""
    schedule = SCHEDULES[name]
    chunks = schedule.default_chunks
    if schedule.keeps_all or schedule.problem(stages, batches, chunks):
        return
    few = schedule.repeating_micro_batches(stages, batches)
    for stage in range(stages):
        whole, short = (
            set(live_states(schedule.order(stage, stages, number, chunks))) for number in (batches, few)
        )
        assert whole == short, (stages, stage, batches)


def test_a_schedule_of_thousands_of_micro_batches_orders_few(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counted(order: Sequence[Action]) -> Iterator[LiveState]:
        lengths.append(len(order))
        return live_states(order)

    monkeypatch.setattr("megalite.planner.liveness.live_states", counted)
    for name in (name for name, schedule in SCHEDULES.items() if not schedule.keeps_all):
        schedule_states(name, 1, 6, 6 * 1009, SCHEDULES[name].default_chunks)
    assert len(lengths) == 5 and max(lengths) <= 6 * 4 * 2 * 3
