"""The fit of a scaling law against losses of known constants, and its planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from megalite.errors import TrainingError
from megalite.studies.scaling_fit import ScalingFit, ScalingLaw, ScalingPoint, fit_scaling_law
from tests.support.parity import FIGURE_RTOL, about

TRUE = ScalingLaw(1.7, 12.0, 200.0, 0.3, 0.35)
SIZES, LENGTHS = (25e3, 55e3, 147e3, 330e3, 790e3), (128e3, 256e3, 512e3, 1e6)
LARGER = (2e6, 2e6)
CONSTANTS = ("irreducible", "a", "b", "alpha", "beta")


def points(noise: float, seed: int = 3) -> list[ScalingPoint]:
    """Return the losses of a ladder with relative errors of `noise`."""
    draw = np.random.default_rng(seed)
    return [
        ScalingPoint(size, length, TRUE.loss(size, length) * float(np.exp(noise * draw.standard_normal())))
        for size in SIZES
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def noisy() -> ScalingFit:
    return fit_scaling_law(points(0.004), seed=0)


def missed(fit: ScalingFit) -> list[str]:
    """Return the constants that lie outside of their intervals."""
    spans = {name: fit.interval([getattr(law, name) for law in fit.resampled]) for name in CONSTANTS}
    return [name for name, (low, high) in spans.items() if not low <= getattr(TRUE, name) <= high]


def test_losses_without_noise_give_back_their_constants() -> None:
    law = fit_scaling_law(points(0.0), seed=0).law
    for name in CONSTANTS:
        assert getattr(law, name) == about(getattr(TRUE, name), FIGURE_RTOL)


def test_the_constants_lie_within_their_own_error_bars(noisy: ScalingFit) -> None:
    assert not missed(noisy)
    low, high = noisy.predicted_interval(*LARGER)
    assert low < TRUE.loss(*LARGER) < high and high - low < 0.1 * TRUE.loss(*LARGER)


def test_parameters_and_tokens_exchanged_are_seen() -> None:
    exchanged = [ScalingPoint(point.tokens, point.parameters, point.loss) for point in points(0.004)]
    assert {"alpha", "beta"} & set(missed(fit_scaling_law(exchanged, seed=0)))


def test_a_ladder_whose_larger_models_are_not_better_is_seen(noisy: ScalingFit) -> None:
    """As with learning rates that do not suit them."""
    untuned = [
        replace(point, loss=point.loss * (point.parameters / SIZES[0]) ** 0.03) for point in points(0.004)
    ]
    assert fit_scaling_law(untuned, seed=0).exponents_at_limit == ["alpha"]
    assert noisy.exponents_at_limit == []


def test_one_outlier_moves_the_law_little(noisy: ScalingFit) -> None:
    spoilt = points(0.004)
    spoilt[7] = replace(spoilt[7], loss=2 * spoilt[7].loss)
    fit = fit_scaling_law(spoilt, seed=0)
    low, high = noisy.predicted_interval(*LARGER)
    assert low < fit.law.loss(*LARGER) < high


def test_the_optimum_is_the_lowest_loss_of_its_operations() -> None:
    flops = 6e15
    best = TRUE.optimum(flops)
    assert 6 * best[0] * best[1] == about(flops, FIGURE_RTOL)
    for factor in (0.9, 1.1):
        other = best[0] * factor
        assert TRUE.loss(other, flops / 6 / other) > TRUE.loss(*best)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(TrainingError, match="there are 5 runs of 2 sizes and 4 numbers of tokens"):
        fit_scaling_law(points(0.0)[:5], seed=0)
