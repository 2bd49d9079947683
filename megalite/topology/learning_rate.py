"""The learning rate as a pure function of the step; `DECAYS` names its schedules. No torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class ScheduleSettings(Protocol):
    """The settings of [optimizer] that a schedule reads."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def minimum_ratio(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def decay_fraction(self) -> float: ...
    @property
    def decay_shape(self) -> str: ...


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to the peak, then a decay to `minimum_ratio` of it that ends at `decay_steps`.

    Steps count from 0; the first of `warmup_steps` already has peak / warmup_steps.
    """

    settings: ScheduleSettings
    warmup_steps: int
    decay_steps: int

    def __call__(self, step: int) -> float:
        peak = self.settings.learning_rate
        if step < self.warmup_steps:
            return peak * (step + 1) / self.warmup_steps
        least = self.settings.minimum_ratio
        return peak * (least + (1.0 - least) * DECAYS[self.settings.schedule](self, step))

    def progress(self, step: int, start: int = 0) -> float:
        """Return the share (0 to 1) of the decay that is over, of one that begins at `start`, after the warm-up."""
        start = max(self.warmup_steps, start)
        return min(1.0, max(0.0, (step - start) / max(1, self.decay_steps - start)))


def _cosine(rate: LearningRate, step: int) -> float:
    """Half a period (Loshchilov and Hutter, "SGDR", 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * rate.progress(step)))


def _linear(rate: LearningRate, step: int) -> float:
    return 1.0 - rate.progress(step)


def _constant(rate: LearningRate, step: int) -> float:
    return 1.0


def _wsd(rate: LearningRate, step: int) -> float:
    """Stay at the peak until the last `decay_fraction` (Hu et al., "MiniCPM", 2024), then fall as 1 - sqrt (Haegele et
    al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024) or evenly."""
    start = round(rate.decay_steps * (1.0 - rate.settings.decay_fraction))
    progress = rate.progress(step, start)
    return 1.0 - (math.sqrt(progress) if rate.settings.decay_shape == "sqrt" else progress)


DECAYS: dict[str, Callable[[LearningRate, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
"""optimizer.schedule -> the share of the way down from the peak that is still to go at a step."""
