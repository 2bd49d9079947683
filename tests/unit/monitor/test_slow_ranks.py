"""A rank that is slower than its peers in most reports is named until it recovers; uneven stages are no alarm."""

from megalite.monitor.slow_ranks import SlowRank, SlowRanks
from tests.support.parity import about

# Two stages of three ranks; the second has twice the work.
STAGES = [(0, 1, 2), (3, 4, 5)]
EVEN = (1.0, 1.1, 0.9, 2.0, 2.1, 2.2)


def slow(rank: int, factor: float = 3.0) -> tuple[float, ...]:
    return tuple(seconds * (factor if rank == at else 1) for at, seconds in enumerate(EVEN))


def changes(
    reports: list[tuple[float, ...]],
    step_seconds: float = 3.0,
    groups: list[tuple[int, ...]] = STAGES,
    steps: int = 1,
) -> list[tuple[int, str, int]]:
    """Return (report, "slow" or "recovered", rank) of each change, reports counted from 1."""
    ranks, changed = SlowRanks(groups), []
    for number, work in enumerate(reports, start=1):
        began, ended = ranks.update(work, step_seconds, steps)
        changed += [(number, "slow", rank.rank) for rank in began]
        changed += [(number, "recovered", rank) for rank in ended]
    return changed


def test_uneven_stages_and_a_slow_start_are_no_alarm() -> None:
    assert changes([slow(1, 50), slow(1, 50), *[EVEN] * 10]) == []


def test_single_slow_reports_are_no_alarm() -> None:
    assert changes([EVEN, EVEN, *[slow(4), EVEN, EVEN] * 6]) == []


def test_a_slow_rank_is_named_once_and_once_more_when_it_recovers() -> None:
    # Two reports warm up, then three of the last five are slow; then three of them are not.
    assert changes([EVEN] * 7 + [slow(4)] * 6 + [EVEN] * 6) == [(10, "slow", 4), (16, "recovered", 4)]


def test_the_factor_is_over_the_peers_of_its_stage() -> None:
    ranks = SlowRanks(STAGES)
    for _ in range(7):
        ranks.update(slow(0), 4.0)
    [(rank, found)] = ranks.slow.items()
    assert (rank, found) == (0, SlowRank(0, 3.0, 1.0)) and found.factor == about(3.0)


def test_a_rank_that_costs_a_small_part_of_the_step_is_no_alarm() -> None:
    assert changes([slow(0)] * 10, step_seconds=30.0) == []
    assert changes([slow(0)] * 10, step_seconds=10.0) == [(7, "slow", 0)]


def test_a_moment_of_short_steps_is_no_alarm() -> None:
    """Steps of an eighth of a second: eight of them are one report."""
    even, late = (0.05, 0.05), (0.05, 0.125)

    def changes_of(reports: list[tuple[float, ...]], steps: int = 1) -> list[tuple[int, str, int]]:
        return changes(reports, step_seconds=0.125, groups=[(0, 1)], steps=steps)

    assert changes_of([even] * 40 + [late] * 16 + [even] * 40) == []
    assert changes_of([even] * 56 + [late] * 24 + [even] * 24) == [(80, "slow", 1), (104, "recovered", 1)]
    assert changes_of([even] * 14 + [late] * 6 + [even] * 6, 4) == [(20, "slow", 1), (26, "recovered", 1)]


def test_short_reports_together_are_the_mean_of_their_steps() -> None:
    ranks = SlowRanks([(0, 1)])
    for _ in range(10):
        ranks.update((1.0, 9.0), 0.125)
        assert ranks.update((1.0, 1.0), 0.125, steps=20) == ([], [])


def changes_alone(reports: list[tuple[float, ...]]) -> list[tuple[int, str, int]]:
    return changes(reports, step_seconds=9.0, groups=[(0,), (1,), (2,)])


def test_a_stage_alone_is_compared_with_its_own_start() -> None:
    start = (1.0, 9.0, 5.0)
    assert changes_alone([start] * 20) == []
    late = [start] * 8 + [(3.0, 9.0, 5.0)] * 6 + [start] * 5
    assert changes_alone(late) == [(11, "slow", 0), (17, "recovered", 0)]
    # Longer sequences: all stages take twice as long, and none is slow.
    assert changes_alone([start] * 8 + [(2.0, 18.0, 10.0)] * 8) == []
    # The start was disturbed for one stage: that another is now slower than it is no alarm.
    assert changes_alone([(8.0, 9.0, 20.0)] * 8 + [start] * 8) == []


def test_one_process_is_never_slow() -> None:
    assert changes([(1.0,)] * 8 + [(9.0,)] * 8, groups=[(0,)]) == []


def test_peers_whose_waits_fill_the_step_leave_a_slow_rank_as_it_was() -> None:
    ranks = SlowRanks([(0, 1)])
    before = [ranks.update((3.0, 1.0), 4.0) for _ in range(7)]
    assert all(ranks.update((3.0, 0.0), 4.0) == ([], []) for _ in range(5))
    assert before[-1][0] == [*ranks.slow.values()] == [SlowRank(0, 3.0, 1.0)]
