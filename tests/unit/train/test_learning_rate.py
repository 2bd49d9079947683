"""Schedules by their values at the turning points."""

from megalite.train.learning_rate import LearningRate
from tests.support.parity import about


def test_warm_up_is_linear_and_reaches_the_peak():
    rate = LearningRate(1.0, "cosine", 4, 20, 0.1)
    assert [rate(step) for step in range(5)] == about([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_is_half_way_in_the_middle_and_stays_at_the_minimum():
    rate = LearningRate(2.0, "cosine", 0, 10, 0.1)
    assert rate(5) == about(2.0 * 0.55)
    assert rate(10) == about(0.2)
    assert rate(1000) == about(0.2)


def test_linear_falls_evenly():
    rate = LearningRate(1.0, "linear", 2, 12, 0.0)
    assert [rate(step) for step in (2, 7, 12)] == about([1.0, 0.5, 0.0])


def test_constant_stays():
    rate = LearningRate(3e-4, "constant", 1, 10, 0.1)
    assert rate(0) == rate(5) == rate(50) == 3e-4


def test_wsd_stays_at_the_peak_and_falls_as_one_minus_the_root_at_the_end():
    rate = LearningRate(1.0, "wsd", 10, 100, 0.0, 0.2)
    assert rate(4) == about(0.5)
    assert rate(10) == rate(45) == rate(80) == 1.0
    assert [rate(step) for step in (85, 100, 120)] == about([1 - 0.25**0.5, 0.0, 0.0])


def test_wsd_may_fall_evenly_to_a_share_of_the_peak():
    rate = LearningRate(2.0, "wsd", 0, 100, 0.1, 0.4, "linear")
    assert [rate(step) for step in (60, 80, 100)] == about([2.0, 1.1, 0.2])
