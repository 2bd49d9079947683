"""The learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay to `peak * minimum_ratio` that ends at `decay_steps`.

    Steps count from 0; the first of `warmup_steps` already has peak / warmup_steps. The cosine form is that of
    Loshchilov and Hutter, "SGDR", 2017, with one half period.
    """

    peak: float
    schedule: Literal["cosine", "linear", "constant"]
    warmup_steps: int
    decay_steps: int
    minimum_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        span = max(1, self.decay_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        left = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.minimum_ratio + (1.0 - self.minimum_ratio) * left)
