"""DeepSpeed's learning-rate schedulers as pure functions of the number of updates made."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.topology.learning_rate import ScheduleSettings


@dataclass(frozen=True)
class DeepSpeedSchedule:
    """The learning rate that a scheduler of DeepSpeed sets for the update after `updates` others.

    The engine steps its scheduler after each update that it did not skip, and a new scheduler stands at iteration -1:
    update n, counted from 0, has the rate of iteration n - 1, and the first one the lowest rate of the warm-up.

    rate: the scheduler's formula. settings: learning_rate is the rate after the warm-up, OneCycle's highest,
    LRRangeTest's first. total_steps: end of the decay. params: the scheduler's other parameters.
    """

    rate: "SchedulerRate"
    settings: ScheduleSettings
    warmup_steps: int
    total_steps: int
    params: Mapping[str, Any]

    def __call__(self, updates: int) -> float:
        return self.rate(self, updates - 1)

    @property
    def peak(self) -> float:
        return float(self.settings.learning_rate)

    def warmup_then_constant(self, iteration: int) -> float:
        return self._from_lowest(self._warmup(iteration) if iteration < self._warmup_end else 1.0)

    def warmup_then_line(self, iteration: int) -> float:
        if iteration < self._warmup_end:
            return self._from_lowest(self._warmup(iteration))
        span = max(1.0, self.total_steps - self._warmup_end)
        return self._from_lowest(max(0.0, (self.total_steps - iteration) / span))

    def warmup_then_cosine(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self._warmup_end:
            lowest = self.params["warmup_min_ratio"]
            return float(self.peak * (lowest + self._warmup(iteration) * (1.0 - lowest)))
        span = max(1, self.total_steps - self._warmup_end)
        progress = min(1.0, (iteration - self._warmup_end + 1) / span)
        height = (1.0 + math.cos(math.pi * progress)) / 2
        floor = self.settings.minimum_ratio
        return float(self.peak * max(0.0, floor + (1.0 - floor) * height))

    def one_cycle(self, iteration: int) -> float:
        params, lowest = self.params, float(self.params["cycle_min_lr"])
        cycle = params["cycle_first_step_size"] + params["cycle_second_step_size"]
        if iteration < 0:
            return lowest
        if iteration < cycle:
            return lowest + (self.peak - lowest) * self._cycle_height((iteration + 1) % cycle)
        if not params["decay_step_size"]:
            return lowest
        decays = (iteration - cycle + 1) / params["decay_step_size"]
        return float(lowest / (1.0 + params["decay_lr_rate"] * decays))

    def _cycle_height(self, place: int) -> float:
        """Return 0 at both ends of the cycle and 1 at its peak; with stairs, the height of the last stair begun."""
        first, second = self.params["cycle_first_step_size"], self.params["cycle_second_step_size"]
        half, steps, risen = (
            ("first", first, place) if place <= first else ("second", second, first + second - place)
        )
        stairs = self.params[f"cycle_{half}_stair_count"]
        return math.floor(risen * stairs / steps) / stairs if stairs else float(risen / steps)

    def range_test(self, iteration: int) -> float:
        intervals = (iteration + 1) / self.params["lr_range_test_step_size"]
        if self.params["lr_range_test_staircase"]:
            intervals = math.floor(intervals)
        return float(self.peak * (1.0 + self.params["lr_range_test_step_rate"] * intervals))

    @property
    def _warmup_end(self) -> int:
        # DeepSpeed's shortest warm-up: the logarithm of 1 would be a divisor.
        return max(2, self.warmup_steps)

    def _warmup(self, iteration: int) -> float:
        """Return the share of the way from the lowest rate to the peak; 0 before the first iteration."""
        if iteration < 0:
            return 0.0
        if self.params["warmup_type"] == "linear":
            return iteration / self._warmup_end
        return math.log(iteration + 1) / math.log(self._warmup_end)

    def _from_lowest(self, share: float) -> float:
        lowest = self.params["warmup_min_lr"]
        return float(lowest + (self.peak - lowest) * share)


SchedulerRate = Callable[[DeepSpeedSchedule, int], float]
