"""The scale that keeps fp16 gradients away from zero (Micikevicius et al., "Mixed Precision Training", 2018)."""

from collections.abc import Mapping
from typing import Any

from megalite.config.sections.training_section import PrecisionSettings


class LossScale:
    """Halves on an overflow, doubles after a window of steps without one; a number in training.loss_scale is fixed."""

    def __init__(self, training: PrecisionSettings):
        fixed = training.loss_scale if training.loss_scale != "dynamic" else None
        self.value = 2.0**training.initial_loss_scale_power if fixed is None else fixed
        self._minimum = float(training.minimum_loss_scale) if fixed is None else fixed
        self._window = training.loss_scale_window if fixed is None else None
        self._hysteresis = training.loss_scale_hysteresis if fixed is None else 1
        self._steps_since_change = 0
        self._overflows_left = self._hysteresis

    @classmethod
    def of(cls, training: PrecisionSettings) -> "LossScale | None":
        """Return the loss scale of a run; None unless the precision is fp16."""
        return cls(training) if training.precision == "fp16" else None

    @property
    def exhausted(self) -> bool:
        """Whether the next overflow would have to halve the scale below its minimum."""
        return self._overflows_left <= 1 and self.value <= self._minimum

    def passed(self) -> None:
        """A step without an overflow."""
        self._steps_since_change += 1
        # More than the window after a resume with a smaller one.
        if self._window is not None and self._steps_since_change >= self._window:
            self.value *= 2
            self._steps_since_change = 0
            self._overflows_left = self._hysteresis

    def overflowed(self) -> None:
        """A step that is skipped."""
        self._steps_since_change = 0
        if self._overflows_left > 1:
            self._overflows_left -= 1
        else:
            self.value = max(self.value / 2, self._minimum)

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
        if "loss_scale" not in scalars or self._window is None:
            return
        self.value = max(float(scalars["loss_scale"]), self._minimum)
        self._steps_since_change = int(scalars["loss_scale_steps_since_change"])
        self._overflows_left = min(int(scalars["loss_scale_overflows_left"]), self._hysteresis)
