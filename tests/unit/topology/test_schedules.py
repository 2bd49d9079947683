"""Schedules simulated: nothing is forgotten, nobody waits for ever, and they are as short and lean as published."""

from itertools import product

import pytest

from megalite.topology.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    gpipe_order,
    ideal_timeline,
    in_flight_peak,
    one_f_one_b_order,
)

SIZES = list(product(range(1, 7), range(1, 13)))
LEGAL = [
    (name, stages, micro_batches)
    for name, (stages, micro_batches) in product(SCHEDULES, SIZES)
    if micro_batches >= stages or not SCHEDULES[name].needs_a_micro_batch_a_stage
]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), LEGAL)
def test_a_schedule_is_complete_and_ends(name: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        actions = SCHEDULES[name].order(stage, stages, micro_batches)
        assert sorted((each.kind, each.micro_batch) for each in actions) == [
            (kind, index) for kind in "BF" for index in range(micro_batches)
        ]
        for kind in "FB":
            indices = [each.micro_batch for each in actions if each.kind == kind]
            assert indices == sorted(indices), "torch accumulates gradients in this order"
    starts = ideal_timeline(name, stages, micro_batches)
    assert len(starts) == 2 * stages * micro_batches
    for (stage, action), start in starts.items():
        if action.kind == "F" and stage > 0:
            assert starts[stage - 1, action] + 1 <= start
        if action.kind == "B":
            assert starts[stage, Action("F", action.micro_batch)] + 1 <= start
            if stage < stages - 1:
                assert starts[stage + 1, action] + 1 <= start


@pytest.mark.parametrize(("name", "stages", "micro_batches"), LEGAL)
def test_both_take_two_times_m_plus_p_minus_1(name: str, stages: int, micro_batches: int) -> None:
    """Narayanan et al. 2021, section 2.2: a bubble of p - 1 forwards and as many backwards."""
    end = max(ideal_timeline(name, stages, micro_batches).values()) + 1
    assert end == 2 * (micro_batches + stages - 1)
    longer = ideal_timeline(name, stages, micro_batches, forward=1, backward=2)
    ends = [start + (2 if action.kind == "B" else 1) for (_, action), start in longer.items()]
    assert max(ends) == 3 * (micro_batches + stages - 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight_peaks(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        lean = in_flight_peak(one_f_one_b_order(stage, stages, micro_batches))
        assert lean == min(stages - stage, micro_batches)
        assert in_flight_peak(gpipe_order(stage, stages, micro_batches)) == micro_batches


def test_stages_that_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        order = gpipe_order(stage, stages, micro_batches)
        return order if stage == 0 else tuple(reversed(order))

    monkeypatch.setitem(SCHEDULES, "gpipe", Schedule("gpipe", crossed, False))
    with pytest.raises(ValueError, match="gpipe deadlocks with 2 stages and 3 micro batches"):
        ideal_timeline("gpipe", 2, 3)
