"""Schedules by their values at the turning points."""

from types import SimpleNamespace

import pytest

from megalite.config.sections.schema import OptimizerConfig, warmup_of
from megalite.topology.learning_rate import DECAYS, LearningRate
from megalite.train.step.options import schedule_of
from tests.support.parity import about


def test_warm_up_is_linear_and_reaches_the_peak():
    rate = LearningRate(OptimizerConfig(learning_rate=1.0, schedule="cosine", minimum_ratio=0.1), 4, 20)
    assert [rate(step) for step in range(5)] == about([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_is_half_way_in_the_middle_and_stays_at_the_minimum():
    rate = LearningRate(OptimizerConfig(learning_rate=2.0, schedule="cosine", minimum_ratio=0.1), 0, 10)
    assert rate(5) == about(2.0 * 0.55)
    assert rate(10) == about(0.2)
    assert rate(1000) == about(0.2)


def test_linear_falls_evenly():
    rate = LearningRate(OptimizerConfig(learning_rate=1.0, schedule="linear", minimum_ratio=0.0), 2, 12)
    assert [rate(step) for step in (2, 7, 12)] == about([1.0, 0.5, 0.0])


def test_constant_stays():
    rate = LearningRate(OptimizerConfig(learning_rate=3e-4, schedule="constant", minimum_ratio=0.1), 1, 10)
    assert rate(0) == rate(5) == rate(50) == 3e-4


def test_wsd_stays_at_the_peak_and_falls_as_one_minus_the_root_at_the_end():
    rate = LearningRate(
        OptimizerConfig(learning_rate=1.0, schedule="wsd", minimum_ratio=0.0, decay_fraction=0.2), 10, 100
    )
    assert rate(4) == about(0.5)
    assert rate(10) == rate(45) == rate(80) == 1.0
    assert [rate(step) for step in (85, 100, 120)] == about([1 - 0.25**0.5, 0.0, 0.0])


def test_wsd_may_fall_evenly_to_a_share_of_the_peak():
    rate = LearningRate(
        OptimizerConfig(
            learning_rate=2.0, schedule="wsd", minimum_ratio=0.1, decay_fraction=0.4, decay_shape="linear"
        ),
        0,
        100,
    )
    assert [rate(step) for step in (60, 80, 100)] == about([2.0, 1.1, 0.2])


@pytest.mark.parametrize(
    ("ratio", "total", "steps"), [(0.1, 30, 3), (0.03, 10, 1), (0.25, 10, 3), (0.0, 9, 0)]
)
def test_a_share_of_the_run_is_whole_steps_rounded_up(ratio: float, total: int, steps: int) -> None:
    assert warmup_of(OptimizerConfig(warmup_ratio=ratio), total) == steps


@pytest.mark.parametrize("schedule", DECAYS)
def test_a_warm_up_by_share_is_that_of_its_steps_also_after_a_resume_with_more_steps(schedule: str) -> None:
    """The rate is a function of the step and the last step: nothing of it is in a checkpoint."""

    def rates(total: int, **warmup: float) -> list[float]:
        optimizer = OptimizerConfig(schedule=schedule, learning_rate=1.0, **warmup)
        schedule_of_run = schedule_of(SimpleNamespace(optimizer=optimizer), total)  # type: ignore[arg-type]
        return [schedule_of_run(step) for step in range(total)]

    assert rates(40, warmup_ratio=0.2) == rates(40, warmup_steps=8)
    assert rates(60, warmup_ratio=0.2)[40:] == rates(60, warmup_steps=12)[40:]
