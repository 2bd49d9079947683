"""Each schedule's bubble: its published formula is what a simulation of its own data gives."""

from itertools import product

import pytest

from megalite.planner.bubble import bubble, published_bubble
from megalite.topology.schedule_timeline import ideal_timeline
from megalite.topology.schedules import SCHEDULES
from tests.support.parity import about
from tests.support.selection import cases

# Sizes with a formula: all that 1F1B and GPipe run, elsewhere full rounds of as many micro batches as stages, two of
# them with a split backward.
FORMULAS = {
    "1f1b": 840,
    "gpipe": 960,
    "interleaved_1f1b": 147,
    "looped_bfs": 147,
    "interleaved_zero_bubble": 132,
    "zbv": 132,
    "dualpipev": 132,
}
SIZES = [(stages, batches) for stages in range(2, 8) for batches in range(1, 3 * stages + 1)]


@pytest.mark.parametrize("name", cases(SCHEDULES, core=["1f1b", "zbv"]))
def test_the_formula_is_the_simulation(name: str) -> None:
    schedule, compared = SCHEDULES[name], 0
    for stages, batches in [*SIZES, (16, 64)]:
        for chunks in [schedule.only_chunks] if schedule.only_chunks else [1, 2, 3]:
            if schedule.problem(stages, batches, chunks):
                continue
            formula = published_bubble(name, stages, batches, chunks)
            if formula is not None:
                compared += 1
                assert formula == about(ideal_timeline(name, stages, batches, chunks).bubble)
    assert compared > 10


@pytest.mark.extended
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_formula_is_the_simulation_of_every_size_up_to_16_stages_and_64_micro_batches(name: str) -> None:
    """With two chunks a stage where the schedule takes any number; the test above has others."""
    schedule, compared = SCHEDULES[name], 0
    chunks = schedule.only_chunks or 2
    for stages, batches in product(range(2, 17), range(1, 65)):
        if schedule.problem(stages, batches, chunks) is None:
            formula = published_bubble(name, stages, batches, chunks)
            if formula is not None:
                compared += 1
                assert formula == about(ideal_timeline(name, stages, batches, chunks).bubble), (
                    stages,
                    batches,
                )
    assert compared == FORMULAS[name]


def test_other_numbers_are_simulated() -> None:
    assert published_bubble("zbv", 4, 5, 2) is None
    assert bubble("zbv", 4, 5, 2) == ideal_timeline("zbv", 4, 5, 2).bubble
    assert bubble("1f1b", 1, 3, 1) == 0


def test_numbers_that_the_schedule_refuses() -> None:
    with pytest.raises(ValueError, match="fewer than the 8 that dualpipev needs"):
        bubble("dualpipev", 4, 6, 2)


def test_rounds_that_repeat_are_not_simulated_and_change_no_bubble() -> None:
    for name, stages, batches in product(SCHEDULES, (2, 3, 5), (11, 17, 26, 60)):
        assert_the_bubble_is_simulated(name, stages, batches)
    for name, schedule in SCHEDULES.items():
        sizes = product(range(1, 65), (63, 64, 100, 1001, 10**6))
        assert all(schedule.repeating_micro_batches(*size) <= min(size[1], 4 * size[0]) for size in sizes), (
            name
        )


@pytest.mark.extended
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_the_simulation_of_every_size_up_to_16_stages_and_64_micro_batches(name: str) -> None:
    for stages, batches in [*product(range(2, 17), range(1, 65)), (4, 1003), (16, 300)]:
        assert_the_bubble_is_simulated(name, stages, batches)


def assert_the_bubble_is_simulated(name: str, stages: int, batches: int) -> None:
    chunks = SCHEDULES[name].default_chunks
    if SCHEDULES[name].problem(stages, batches, chunks) is None:
        simulated = ideal_timeline(name, stages, batches, chunks).bubble
        assert bubble(name, stages, batches, chunks) == about(simulated), (stages, batches)
