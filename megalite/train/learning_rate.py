"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay to `peak * minimum_ratio` that ends at `decay_steps`.

    Steps count from 0; the first of `warmup_steps` already has peak / warmup_steps. The cosine form is that of
    Loshchilov and Hutter, "SGDR", 2017, with one half period. "wsd" stays at the peak until the last
    `decay_fraction` of `decay_steps` (Hu et al., "MiniCPM", 2024), where it falls as 1 - sqrt (Haegele et al.,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024) or evenly.
    """

    peak: float
    schedule: Literal["cosine", "linear", "constant", "wsd"]
    warmup_steps: int
    decay_steps: int
    minimum_ratio: float
    decay_fraction: float = 0.1
    decay_shape: Literal["sqrt", "linear"] = "sqrt"

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        span = max(1, self.decay_steps - self._decay_start)
        progress = min(1.0, max(0.0, (step - self._decay_start) / span))
        return self.peak * (self.minimum_ratio + (1.0 - self.minimum_ratio) * self._left(progress))

    @property
    def _decay_start(self) -> int:
        stable = round(self.decay_steps * (1.0 - self.decay_fraction)) if self.schedule == "wsd" else 0
        return max(self.warmup_steps, stable)

    def _left(self, progress: float) -> float:
        """The share of the way down that is still to go, after `progress` (0 to 1) of the decay's steps."""
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.schedule == "wsd" and self.decay_shape == "sqrt":
            return 1.0 - math.sqrt(progress)
        return 1.0 - progress
