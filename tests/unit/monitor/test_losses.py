"""A spike of the loss is told from its noise and its descent."""

import math

import pytest

from megalite.monitor.losses import EpochLoss, LossSpikes
from tests.support.parity import about

NOISY = [3.0 + 0.01 * (step % 7) for step in range(40)]


def after(losses: list[float], **settings: float) -> LossSpikes:
    spikes = LossSpikes(**settings)  # type: ignore[arg-type]
    spikes.go_on(losses)
    return spikes


def test_a_spike_is_above_the_median_by_its_excess() -> None:
    spikes = after(NOISY)
    assert spikes.update(4.03) == about(1.0)
    assert spikes.update(3.05) is None


@pytest.mark.parametrize(
    ("earlier", "loss"),
    [
        pytest.param(NOISY[:19], 9.0, id="too few steps"),
        pytest.param([3.0] * 40, 3.2, id="less than a tenth"),
        pytest.param([3.0 + step % 7 for step in range(40)], 12.0, id="as noisy before"),
        pytest.param([12 - 0.1 * step for step in range(100)], 9.0, id="a descent"),
        pytest.param(NOISY, 1.0, id="below"),
        pytest.param(NOISY, math.nan, id="not finite"),
    ],
)
def test_no_spike(earlier: list[float], loss: float) -> None:
    assert after(earlier).update(loss) is None


def test_losses_that_are_not_finite_leave_the_median_as_it_is() -> None:
    spikes = after(NOISY)
    for _ in range(30):
        assert spikes.update(math.inf) is None
    assert spikes.update(4.03) == about(1.0)


def test_the_window_and_the_deviations_are_settings() -> None:
    assert after(NOISY[:4], window=4).update(4.03) is not None
    assert after(NOISY[:3], window=4).update(4.03) is None
    rising = [1.0 + 0.1 * step for step in range(40)]
    assert after(rising, deviations=2.0).update(8.0) is not None
    assert after(rising).update(8.0) is None
    spikes = after(rising, window=4)
    assert spikes.update(8.0) is not None and spikes.losses == [*rising[-3:], 8.0]


def test_the_loss_of_an_epoch_is_the_mean_of_its_finite_steps() -> None:
    records = [
        {"loss": 5.0},
        {"loss": 4.0, "epoch": 1},
        {"loss": 3.0},
        {"loss": None},
        {"validation_loss": 9.0},
    ]
    resumed = EpochLoss(reversed(records))
    assert resumed.add(2.0, ends=True) == 2.5
    assert resumed.add(7.0, ends=False) is None and resumed.add(math.inf, ends=True) == 7.0
    assert EpochLoss(records[:1]).add(4.0, ends=True) == 4.5
    assert math.isnan(EpochLoss().add(math.nan, ends=True) or 0.0)
