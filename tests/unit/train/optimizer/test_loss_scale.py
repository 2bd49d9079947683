"""The dynamic loss scale by its turning points."""

import pytest

from megalite.config.sections.training_section import PrecisionSettings
from megalite.train.optimizer.loss_scale import LossScale
from tests.support import reported_faults as faults
from tests.support.museum import exhibit


def after(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: "o" an overflow, "." none."""
    values = []
    for step in steps:
        scale.overflowed() if step == "o" else scale.passed()
        values.append(scale.value)
    return values


def test_it_halves_on_an_overflow_and_doubles_after_a_window() -> None:
    scale = LossScale(PrecisionSettings(loss_scale_window=3))
    assert scale.value == 65536
    assert after(scale, "..o...") == [65536, 65536, 32768, 32768, 32768, 65536]
    assert after(scale, "..o.") == [65536, 65536, 32768, 32768]


def test_hysteresis_forgives_the_first_overflows_of_a_window() -> None:
    scale = LossScale(
        PrecisionSettings(initial_loss_scale_power=4, loss_scale_window=2, loss_scale_hysteresis=2)
    )
    assert after(scale, "oo") == [16, 8]
    assert after(scale, "o..o") == [4, 4, 8, 8]


@exhibit(
    "ms-swift#4374",
    subject="optimizer",
    there="after hours a run ended because its loss scale could not fall further, or went on without training",
    here="the last scale is known, and the next overflow ends the run",
    fault=faults.A_USED_UP_LOSS_SCALE_GOES_ON,
)
def test_it_is_exhausted_where_it_would_fall_below_the_minimum() -> None:
    scale = LossScale(PrecisionSettings(initial_loss_scale_power=2, minimum_loss_scale=2))
    assert not scale.exhausted
    assert after(scale, "o") == [2] and scale.exhausted


def test_a_fixed_scale_neither_grows_nor_shrinks() -> None:
    scale = LossScale(PrecisionSettings(loss_scale=128.0))
    assert after(scale, "." * 5000)[-1] == 128 and scale.exhausted


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("stop", range(12))
def test_it_goes_on_where_it_was_saved(stop: int, hysteresis: int) -> None:
    steps, settings = "..o....oo...", PrecisionSettings(loss_scale_window=3, loss_scale_hysteresis=hysteresis)
    whole = after(LossScale(settings), steps)
    first, second = LossScale(settings), LossScale(settings)
    after(first, steps[:stop])
    second.load(first.scalars())
    assert after(second, steps[stop:]) == whole[stop:]


def test_a_checkpoint_of_another_precision_has_none_to_take_over() -> None:
    scale = LossScale(PrecisionSettings(initial_loss_scale_power=3))
    scale.load({"step": 3.0})
    assert scale.value == 8


def test_a_fixed_scale_stays_itself_after_a_resume_from_a_dynamic_run() -> None:
    fixed = LossScale(PrecisionSettings(loss_scale=128.0))
    fixed.load(LossScale(PrecisionSettings()).scalars())
    assert fixed.value == 128 and fixed.exhausted
    assert after(fixed, "." * 1500)[-1] == 128


def test_a_resume_with_a_smaller_window_or_hysteresis_obeys_the_new_one() -> None:
    slow, quick = (
        LossScale(
            PrecisionSettings(initial_loss_scale_power=6, loss_scale_window=1000, loss_scale_hysteresis=4)
        ),
        PrecisionSettings(loss_scale_window=3),
    )
    after(slow, "." * 500)
    resumed = LossScale(quick)
    resumed.load(slow.scalars())
    assert after(resumed, "....o") == [128, 128, 128, 256, 128]


def test_a_resume_with_a_larger_minimum_is_not_below_it() -> None:
    resumed = LossScale(PrecisionSettings(minimum_loss_scale=32))
    resumed.load(LossScale(PrecisionSettings(initial_loss_scale_power=2)).scalars())
    assert resumed.value == 32
