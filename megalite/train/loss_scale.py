"""The scale that keeps fp16 gradients away from zero (Micikevicius et al., "Mixed Precision Training", 2018)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LossScaleSettings:
    """initial: the first scale. window: steps in a row without an overflow that double it; None: a fixed scale.

    hysteresis: the overflow since the last doubling that halves it. minimum: it is never halved below this.
    """

    initial: float = 2.0**16
    window: int | None = 1000
    hysteresis: int = 1
    minimum: float = 1.0


class LossScale:
    """Halves on an overflow, doubles after a window of steps without one."""

    def __init__(self, settings: LossScaleSettings):
        self._settings = settings
        self.value = settings.initial
        self._steps_since_change = 0
        self._overflows_left = settings.hysteresis

    @property
    def exhausted(self) -> bool:
        """Whether the next overflow would have to halve the scale below its minimum."""
        return self._overflows_left <= 1 and self.value <= self._settings.minimum

    def passed(self) -> None:
        """A step without an overflow."""
        self._steps_since_change += 1
        # More than the window after a resume with a smaller one.
        if self._settings.window is not None and self._steps_since_change >= self._settings.window:
            self.value *= 2
            self._steps_since_change = 0
            self._overflows_left = self._settings.hysteresis

    def overflowed(self) -> None:
        """A step that is skipped."""
        self._steps_since_change = 0
        if self._overflows_left > 1:
            self._overflows_left -= 1
        else:
            self.value = max(self.value / 2, self._settings.minimum)

    def scalars(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {
            "loss_scale": self.value,
            "loss_scale_steps_since_change": self._steps_since_change,
            "loss_scale_overflows_left": self._overflows_left,
        }

    def load(self, scalars: Mapping[str, Any]) -> None:
        """Continue with the scale of a checkpoint, within the limits of this run's settings.

        A fixed scale keeps its own value. A checkpoint of another precision has no scale: this one starts anew.
        """
        if "loss_scale" not in scalars or self._settings.window is None:
            return
        self.value = max(float(scalars["loss_scale"]), self._settings.minimum)
        self._steps_since_change = int(scalars["loss_scale_steps_since_change"])
        self._overflows_left = min(int(scalars["loss_scale_overflows_left"]), self._settings.hysteresis)
