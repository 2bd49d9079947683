"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta: its fit, its errors by bootstrap, its compute optimum.

N is the number of parameters outside of the embedding and the head, D the number of tokens, L a loss in nats.
Source: Hoffmann et al., "Training compute-optimal large language models", 2022, arXiv 2203.15556, section 3.3 and
appendix D: the Huber loss (delta 1e-3) of log L, from a grid of starts. They minimise with L-BFGS; here five unknowns
are few enough for Levenberg and Marquardt's method, with Huber's weights, for all starts and resamples at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megalite.errors import TrainingError, counted

Floats = NDArray[np.float64]

HUBER_DELTA = 1e-3
LEAST_RUNS = 6
RESAMPLES = 200
_STEPS, _GAIN, _STILL_STEPS = 300, 1e-6, 10
_UNKNOWNS = 5
# Starts: the share of E in the lowest loss, that of A / N^alpha in the rest, and both exponents.
_FLOORS, _SHARES, _EXPONENTS = (0.2, 0.6, 0.9), (0.25, 0.75), (0.15, 0.4, 0.9)
# Exponents stay within these limits, where a resample cannot tell them from none.
_LOG_LIMITS = (math.log(1e-3), math.log(5.0))


@dataclass(frozen=True)
class ScalingPoint:
    """A finished run: parameters, tokens, and the loss in nats a token."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """The constants of the law."""

    irreducible: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the N and D of the lowest loss with 6 N D = `flops` (equation 4 of the paper)."""
        total = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / total)
        parameters = ratio * (flops / 6) ** (self.beta / total)
        return parameters, flops / 6 / parameters


@dataclass(frozen=True)
class ScalingFit:
    """The law of some points, and the laws of their resamples.

    residuals: log(measured / fitted) of each point.
    """

    law: ScalingLaw
    resampled: tuple[ScalingLaw, ...]
    points: tuple[ScalingPoint, ...]
    residuals: tuple[float, ...]

    @property
    def exponents_at_limit(self) -> list[str]:
        """The exponents that the points do not determine."""
        exponents = {"alpha": self.law.alpha, "beta": self.law.beta}
        least, most = _LOG_LIMITS
        return [name for name, value in exponents.items() if not least + 0.01 < math.log(value) < most - 0.01]

    def interval(self, values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
        """Return the central interval of a value of each resampled law."""
        low, high = np.quantile(np.array(values), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def predicted_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Return the 95 % interval of the loss of one more run: the law's error and the scatter of single runs.

        Says nothing of a law that does not hold outside of the ladder.
        """
        scatter = np.array(self.residuals) * math.sqrt(len(self.points) / (len(self.points) - _UNKNOWNS))
        losses = [law.loss(parameters, tokens) for law in self.resampled]
        return self.interval([loss * math.exp(noise) for loss in losses for noise in scatter])


def fit_scaling_law(points: Sequence[ScalingPoint], seed: int) -> ScalingFit:
    """Fit the law, and fit it again to resamples of the points, drawn with replacement. seed: that of the draws.

    Raises TrainingError for too few runs, or for fewer than 3 sizes or 3 numbers of tokens.
    """
    sizes = {point.parameters for point in points}
    lengths = {point.tokens for point in points}
    if len(points) < LEAST_RUNS or min(len(sizes), len(lengths)) < 3:
        raise TrainingError(
            f"a fit needs {LEAST_RUNS} finished runs of 3 sizes and 3 numbers of tokens; there are "
            f"{counted(len(points), 'run')} of {counted(len(sizes), 'size')} and {len(lengths)} numbers of tokens"
        )
    system = _System(points)
    everything = np.ones((1, len(points)))
    [best] = system.minimise(system.starts()[None], everything)
    draw = np.random.default_rng(seed)
    counts = np.array([_resample(draw, points) for _ in range(RESAMPLES)], dtype=np.float64)
    # The fit to all points, and starts far from it, so that a resample may have another minimum.
    starts = np.concatenate([best[None], system.starts()[::11]])
    laws = system.minimise(np.broadcast_to(starts, (RESAMPLES, *starts.shape)), counts)
    law = system.law(best)
    residuals = [math.log(point.loss / law.loss(point.parameters, point.tokens)) for point in points]
    return ScalingFit(law, tuple(map(system.law, laws)), tuple(points), tuple(residuals))


def _resample(draw: np.random.Generator, points: Sequence[ScalingPoint]) -> list[int]:
    """Return how often each point is drawn; a draw that the law cannot be fitted to is drawn again."""
    while True:
        counts = np.bincount(draw.integers(len(points), size=len(points)), minlength=len(points))
        kept = [point for point, count in zip(points, counts, strict=True) if count]
        if (
            len(kept) >= _UNKNOWNS
            and min(len({point.parameters for point in kept}), len({point.tokens for point in kept})) > 2
        ):
            return [int(count) for count in counts]


class _System:
    """The points as arrays, and unknowns [..., 5]: log of A / N^alpha, of B / D^beta and of E, log alpha, log beta.

    The first two are those at the geometric mean of all N and D, which are nearly independent of the exponents.
    """

    def __init__(self, points: Sequence[ScalingPoint]):
        n = np.log([point.parameters for point in points])
        d = np.log([point.tokens for point in points])
        self._mean_n, self._mean_d = float(n.mean()), float(d.mean())
        self._n, self._d = n - self._mean_n, d - self._mean_d
        self._losses = np.log([point.loss for point in points])

    def starts(self) -> Floats:
        lowest = math.exp(float(self._losses.min()))
        return np.array(
            [
                [
                    math.log(lowest * (1 - floor) * share),
                    math.log(lowest * (1 - floor) * (1 - share)),
                    math.log(lowest * floor),
                    math.log(alpha),
                    math.log(beta),
                ]
                for floor, share, alpha, beta in product(_FLOORS, _SHARES, _EXPONENTS, _EXPONENTS)
            ]
        )

    def law(self, unknowns: Floats) -> ScalingLaw:
        first, second, floor, log_alpha, log_beta = map(float, unknowns)
        alpha, beta = math.exp(log_alpha), math.exp(log_beta)
        a, b = math.exp(first + alpha * self._mean_n), math.exp(second + beta * self._mean_d)
        return ScalingLaw(math.exp(floor), a, b, alpha, beta)

    def minimise(self, starts: Floats, counts: Floats) -> Floats:
        """Return the unknowns [P, 5] of the lowest Huber loss of P problems.

        starts: [P, S, 5]. counts: [P, R], the weight of each of R points.
        """
        unknowns = np.array(starts)
        weights = counts[:, None, :]
        damping = np.full(unknowns.shape[:2], 1e-2)
        loss, residuals, slopes = self._evaluate(unknowns, weights)
        still = 0
        for _ in range(_STEPS):
            huber = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
            transposed = (slopes * huber[..., None]).swapaxes(-1, -2)
            gradient = (transposed @ residuals[..., None])[..., 0]
            curvature = transposed @ slopes
            diagonal = np.diagonal(curvature, axis1=-2, axis2=-1)
            damped = curvature + (damping[..., None] * (diagonal + 1e-9))[..., None] * np.eye(_UNKNOWNS)
            step = np.linalg.solve(damped, -gradient[..., None])[..., 0]
            moved = unknowns + np.clip(step, -1.0, 1.0)
            moved[..., 3:] = np.clip(moved[..., 3:], *_LOG_LIMITS)
            new_loss, new_residuals, new_slopes = self._evaluate(moved, weights)
            better = new_loss < loss
            gain = np.max(np.where(better, loss - new_loss, 0.0) / np.maximum(loss, 1e-30))
            still = still + 1 if gain < _GAIN else 0
            unknowns = np.where(better[..., None], moved, unknowns)
            residuals = np.where(better[..., None], new_residuals, residuals)
            slopes = np.where(better[..., None, None], new_slopes, slopes)
            loss = np.where(better, new_loss, loss)
            damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
            if still == _STILL_STEPS:
                break
        best = np.argmin(loss, axis=1)
        return np.asarray(unknowns[np.arange(len(unknowns)), best], dtype=np.float64)

    def _evaluate(self, unknowns: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the Huber loss [P, S], the residuals [P, S, R] and their slopes [P, S, R, 5]."""
        alpha, beta = np.exp(unknowns[..., 3:4]), np.exp(unknowns[..., 4:5])
        first = unknowns[..., 0:1] - alpha * self._n
        second = unknowns[..., 1:2] - beta * self._d
        terms = np.stack([first, second, np.broadcast_to(unknowns[..., 2:3], first.shape)], axis=-1)
        largest = terms.max(axis=-1, keepdims=True)
        shares = np.exp(terms - largest)
        total = shares.sum(axis=-1, keepdims=True)
        shares = shares / total
        residuals = (largest + np.log(total))[..., 0] - self._losses
        in_exponents = [
            -shares[..., 0:1] * (alpha * self._n)[..., None],
            -shares[..., 1:2] * (beta * self._d)[..., None],
        ]
        slopes = np.concatenate([shares, *in_exponents], axis=-1)
        size = np.abs(residuals)
        huber = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
        return (weights * huber).sum(axis=-1), residuals, slopes
