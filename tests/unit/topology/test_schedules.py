"""Schedules: when they run, and what they are like.

Each is complete, ends, and is as short and as lean as a closed form says, for every legal number of stages, micro
batches and chunks up to LARGEST. In the formulas P is stages, M micro batches, v chunks a stage, s the stage; F, B,
I and W are the costs of one chunk, and `idle` is what a stage waits over the whole step, in the same unit: the length
less v * M * (F + B). The bubble is idle over length.
"""

from functools import cache
from itertools import product

import pytest

from megalite.topology.schedule_timeline import (
    UNIT,
    Costs,
    Timeline,
    ideal_timeline,
    in_flight_chunks,
    orders_of,
    play,
)
from megalite.topology.schedules import SCHEDULES, Action
from megalite.topology.stages import pipeline_split
from tests.support.parity import about
from tests.support.schedule_checks import check_order, in_flight_peak

LARGEST = {"stages": 8, "micro_batches": 24, "chunks": 4}
SIZES = list(product(*(range(1, size + 1) for size in LARGEST.values())))
Case = tuple[int, int, int]

# B is I + W, as it is without recompute. W is the shortest of F, I and W in the first, and the longest in the second.
UNEVEN = [Costs(2, 5, 3, 2), Costs(1, 3, 1, 2)]
LOPSIDED = [*UNEVEN, Costs(3, 3, 2, 1), Costs(2, 5, 4, 1), Costs(3, 5, 2, 3)]


cached_orders = cache(orders_of)


@cache
def legal_sizes(name: str) -> list[Case]:
    return [size for size in SIZES if SCHEDULES[name].problem(*size) is None]


def idle(name: str, size: Case, costs: Costs = UNIT) -> float:
    _, micro_batches, chunks = size
    return play(cached_orders(name, *size), costs).length - chunks * micro_batches * (
        costs.forward + costs.backward
    )


def waits_inside(timeline: Timeline, stage: int) -> float:
    """How long a stage waits from its first start to its last end."""
    spans = [
        (start, timeline.costs.of(action)) for (at, action), start in timeline.starts.items() if at == stage
    ]
    first, last = min(start for start, _ in spans), max(start + cost for start, cost in spans)
    return last - first - sum(cost for _, cost in spans)


def test_how_many_sizes_are_legal() -> None:
    """So that no test below is about nothing."""
    assert {name: len(legal_sizes(name)) for name in SCHEDULES} == {
        "1f1b": 8 * 24 - 28,
        "gpipe": 8 * 24,
        "interleaved_1f1b": 4 * (8 * 24 - 55),
        "looped_bfs": 4 * 8 * 24,
        "interleaved_zero_bubble": 4 * (8 * 24 - 55),
        "zbv": 8 * 24,
        "dualpipev": 8 * 24 - 64,
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_complete_and_ends(name: str) -> None:
    for size in legal_sizes(name):
        stages, micro_batches, chunks = size
        split = pipeline_split(
            stages * chunks, stages, chunks_per_stage=chunks, v_shaped=SCHEDULES[name].v_shaped
        )
        assert check_order(cached_orders(name, *size), split, micro_batches) == [], size


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_what_splits_the_backward_has_i_and_w(name: str) -> None:
    kinds = {
        action.kind for order in orders_of(name, 2, 4, SCHEDULES[name].default_chunks) for action in order
    }
    assert (kinds >= {"I", "W"}) == SCHEDULES[name].splits_backward
    assert ("B" in kinds) == (name not in ("interleaved_zero_bubble", "zbv"))


def test_a_timeline_keeps_what_actions_need() -> None:
    """Written out apart from the code that makes it: nothing starts before what it needs has ended."""
    costs = Costs(2, 5, 3, 2, chunks=(1, 2, 1, 3, 1, 1))
    for name, chunks in (
        ("interleaved_1f1b", 2),
        ("dualpipev", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
    ):
        timeline = ideal_timeline(name, 3, 6, chunks, costs)
        end = {action: start + costs.of(action) for (_, action), start in timeline.starts.items()}
        assert len(end) == len(timeline.starts)
        for (stage, action), start in timeline.starts.items():
            kind, chunk, batch = action.kind, action.chunk, action.micro_batch
            if kind == "F" and chunk:
                assert start >= end[Action("F", chunk - 1, batch)]
            if kind in "BI":
                assert start >= end[Action("F", chunk, batch)]
                after = [end.get(Action(each, chunk + 1, batch)) for each in ("B", "I")]
                assert chunk == 5 or [start >= each for each in after if each is not None] == [True]
            if kind == "W":
                assert start >= end[Action("I", chunk, batch)]
            beside = [other for (at, act), other in timeline.starts.items() if at == stage and act != action]
            assert not any(start <= other < start + costs.of(action) for other in beside)
        assert timeline.length == max(end.values())


def undivided(size: Case, costs: Costs) -> float:
    """Narayanan et al. 2021, 2.2: idle = (P - 1) (F + B), for chunks of 1 / v of a stage's work.

    With M < P every chunk but the first waits for its first micro batch to come around: (v - 1) (P - M) (F + B) more.
    """
    stages, micro_batches, chunks = size
    around = (chunks - 1) * max(0, stages - micro_batches)
    return (stages - 1 + around) * (costs.forward + costs.backward)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
def test_undivided_backwards_leave_the_bubble_of_narayanan(name: str) -> None:
    for size, costs in product(legal_sizes(name), [UNIT, Costs(3, 1)]):
        stages, micro_batches, chunks = size
        assert idle(name, size, costs) == undivided(size, costs), size
        if micro_batches >= stages:
            of_the_work = (stages - 1) / (chunks * micro_batches)
            bubble = play(cached_orders(name, *size), costs).bubble
            assert bubble == about(of_the_work / (1 + of_the_work))


def test_zero_bubble_saves_the_weight_gradients() -> None:
    """Qi et al. 2023, table 1, ZB-H1: idle = (P - 1) (F + I - W), from M = P on, where W is the shortest of the three.

    Elsewhere less than with an undivided backward, wherever there are stages to wait for.
    """
    name = "interleaved_zero_bubble"
    for size, costs in product(legal_sizes(name), [UNIT, *UNEVEN]):
        stages, micro_batches, _ = size
        waiting = idle(name, size, costs)
        shortest = costs.weight_gradient <= min(costs.forward, costs.input_gradient)
        if micro_batches >= stages and shortest:
            saved = costs.forward + costs.input_gradient - costs.weight_gradient
            assert waiting == (stages - 1) * saved, size
        assert waiting < undivided(size, costs) if stages > 1 else waiting == 0, size


def test_zbv_waits_for_nothing_once_it_has_begun() -> None:
    """Qi et al. 2023, section 6: with F = I = W no stage waits between its first and last action if M >= 2 P - 1.

    Stages begin, and end, one after the other: idle = P - 1. Too few micro batches leave 4 (P - 1) - 2 (M - 1), the way
    of the first one down, up and back again less what the others fill of it.
    """
    for size in legal_sizes("zbv"):
        stages, micro_batches, _ = size
        expected = max(stages - 1, 4 * (stages - 1) - 2 * (micro_batches - 1))
        assert idle("zbv", size) == expected, size
        if micro_batches >= 2 * stages - 1:
            timeline = play(cached_orders("zbv", *size))
            assert [waits_inside(timeline, stage) for stage in range(stages)] == [0] * stages, size
            assert (
                timeline.bubble < ideal_timeline("1f1b", stages, micro_batches, 1, Costs(2, 4)).bubble
                or stages == 1
            )


def test_dualpipev_waits_no_longer_than_published() -> None:
    """DeepSeek-AI, DualPipe's README, with P ranks for its PP / 2: idle <= (P - 1) (F&B + B - 3 W), F&B = F + B.

    With F = I = W it is P - 1, as ZBV's.
    """
    for size, costs in product(legal_sizes("dualpipev"), [UNIT, *LOPSIDED]):
        published = costs.forward + 2 * costs.backward - 3 * costs.weight_gradient
        assert idle("dualpipev", size, costs) <= (size[0] - 1) * published, size
        if costs is UNIT:
            assert idle("dualpipev", size) == size[0] - 1, size


def peak(name: str, size: Case, stage: int) -> int:
    """The chunks' activations alive at once, in closed form; a stage has v for every micro batch."""
    stages, micro_batches, chunks = size
    a_round = micro_batches // max(1, micro_batches // stages)
    every, below = chunks * micro_batches, stages - 1 - stage
    peaks = {
        "gpipe": every,
        "looped_bfs": every,
        "1f1b": min(stages - stage, every),
        "interleaved_1f1b": min((chunks - 1) * a_round + 2 * below + 1, every),
        "interleaved_zero_bubble": min((chunks - 1) * a_round + stages, every),
        "zbv": min(2 * stages, micro_batches + stage + 1, every),
        "dualpipev": 2 * stages + 1,
    }
    return peaks[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_peaks(name: str) -> None:
    for size in legal_sizes(name):
        for stage, order in enumerate(cached_orders(name, *size)):
            alive = in_flight_chunks(order)
            assert alive == peak(name, size, stage), (size, stage)
            assert -(-alive // size[2]) <= in_flight_peak(order) <= min(alive, size[1])
            if size[2] == 1:
                assert in_flight_peak(order) == alive


def test_micro_batches_in_flight_where_the_model_goes_down_and_up() -> None:
    for name in ("zbv", "dualpipev"):
        for size in legal_sizes(name):
            for stage, order in enumerate(cached_orders(name, *size)):
                assert in_flight_peak(order) == min(2 * size[0] - stage, size[1])


def test_uneven_chunks_cost_what_their_factor_says() -> None:
    """A chunk of twice the work sets the pace: each way, the first micro batch through all and the others behind."""
    costs = Costs(1, 2, chunks=(1, 1, 2, 1))
    assert ideal_timeline("gpipe", 4, 8, 1, costs).length == (1 + 2) * (5 + 7 * 2)
    assert (
        ideal_timeline("gpipe", 2, 2, 1, Costs(1, 2, chunks=(1, 1))).bubble
        == ideal_timeline("gpipe", 2, 2).bubble
    )
    assert ideal_timeline("gpipe", 1, 3).bubble == 0


REASONS = [
    ("1f1b", (4, 3, 1), "3 micro batches are fewer than the 4 that 1f1b needs for 4 stages"),
    ("1f1b", (2, 1, 1), "1 micro batch is fewer than the 2 that 1f1b needs for 2 stages"),
    ("1f1b", (4, 8, 2), "1f1b runs 1 chunk per stage, not 2"),
    ("gpipe", (4, 8, 4), "gpipe runs 1 chunk per stage, not 4"),
    ("zbv", (4, 8, 1), "zbv runs 2 chunks per stage, not 1"),
    ("dualpipev", (4, 8, 3), "dualpipev runs 2 chunks per stage, not 3"),
    ("dualpipev", (4, 7, 2), "7 micro batches are fewer than the 8 that dualpipev needs for 4 stages"),
    (
        "interleaved_1f1b",
        (4, 13, 3),
        "13 micro batches do not make 3 equal rounds, as interleaved_1f1b needs for 4 stages",
    ),
]


@pytest.mark.parametrize(("name", "size", "reason"), REASONS)
def test_what_does_not_run_is_said(name: str, size: Case, reason: str) -> None:
    assert SCHEDULES[name].problem(*size) == reason
    with pytest.raises(ValueError, match=reason):
        ideal_timeline(name, *size)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_nearest_number_of_micro_batches(name: str) -> None:
    schedule = SCHEDULES[name]
    for stages, micro_batches, chunks in SIZES:
        if not schedule.takes_chunks(chunks):
            with pytest.raises(ValueError, match="chunk"):
                schedule.nearest_micro_batches(stages, micro_batches, chunks)
            continue
        nearest = schedule.nearest_micro_batches(stages, micro_batches, chunks)
        passed_over = range(micro_batches, nearest)
        assert schedule.problem(stages, nearest, chunks) is None
        assert all(schedule.problem(stages, each, chunks) for each in passed_over)
    most = 2**31 - 1
    assert schedule.nearest_micro_batches(most // 3, most - 4, schedule.default_chunks) >= most - 4


def test_the_default_number_of_chunks_is_legal() -> None:
    assert {name: schedule.default_chunks for name, schedule in SCHEDULES.items()} == {
        "1f1b": 1,
        "gpipe": 1,
        "interleaved_1f1b": 2,
        "looped_bfs": 2,
        "interleaved_zero_bubble": 2,
        "zbv": 2,
        "dualpipev": 2,
    }
    for schedule in SCHEDULES.values():
        assert schedule.takes_chunks(schedule.default_chunks)
        assert not schedule.takes_chunks(0)


SPLIT = pipeline_split(4, 2, chunks_per_stage=2, v_shaped=True)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_dropped_action_is_found(stage: int) -> None:
    for name in ("zbv", "dualpipev"):
        orders = orders_of(name, 2, 4, 2)
        for place, dropped in enumerate(orders[stage]):
            broken = list(orders)
            broken[stage] = orders[stage][:place] + orders[stage][place + 1 :]
            where = f"micro batch {dropped.micro_batch} in chunk {dropped.chunk}"
            [said] = check_order(broken, SPLIT, 4)
            assert said.startswith(f"{where} runs as ") and said.endswith(", which is neither FB nor FIW")
            with pytest.raises(ValueError, match=where):
                play(broken)


def test_a_repeated_action_is_found() -> None:
    orders = orders_of("zbv", 2, 4, 2)
    assert check_order([orders[0], (*orders[1], orders[1][-1])], SPLIT, 4) == [
        "micro batch 3 in chunk 1 runs as FIWW, which is neither FB nor FIW"
    ]


def test_an_action_of_another_stage_is_found() -> None:
    orders = orders_of("zbv", 2, 4, 2)
    looped = pipeline_split(4, 2, chunks_per_stage=2)
    assert "stage 0 runs F of micro batch 0 in chunk 3, which is not on this stage" in check_order(
        orders, looped, 4
    )
    assert "stage 0 runs F of micro batch 3 in chunk 0, which is not on this stage" in check_order(
        orders, SPLIT, 3
    )


def test_swapped_actions_that_deadlock_are_found() -> None:
    """After a swap of any two neighbouring actions, the stages still end, or the message names where they wait."""
    orders = orders_of("1f1b", 2, 4, 1)
    split = pipeline_split(2, 2)
    stuck = []
    for place in range(len(orders[1]) - 1):
        swapped = list(orders[1])
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        if said := check_order([orders[0], swapped], split, 4):
            stuck.append(place)
            assert len(said) == 1 and f"stage 1 before {orders[1][place + 1]}" in said[0]
            with pytest.raises(ValueError, match=r"deadlock: stage 0 before .*, stage 1 before "):
                play([orders[0], swapped])
    # F B F B F B F B: B before its F never runs; F before the B in front of it would need stage 0 further ahead.
    assert stuck == [0, 2, 4, 6]


def test_a_weight_gradient_before_its_input_gradient_is_found() -> None:
    forward, backward, weight = (Action(kind, 0, 0) for kind in ("F", "I", "W"))
    split = pipeline_split(1)
    assert check_order([[forward, backward, weight]], split, 1) == []
    assert check_order([[forward, weight, backward]], split, 1) == [
        "deadlock: stage 0 before W of micro batch 0 in chunk 0"
    ]
