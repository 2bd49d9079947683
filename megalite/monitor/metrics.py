"""The numbers of one step, as every reader of a run sees them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_FP16_ONLY = ("loss_scale", "skipped_steps")


@dataclass(frozen=True)
class StepMetrics:
    """One step of a run; the field names are the keys of metrics.jsonl.

    step: counted from 1. loss: mean over the counted tokens of the global batch, before the step's update.
    grad_norm: global L2 norm before clipping. tokens: seen since the run began, all ranks together.
    tokens_per_second: of all ranks, over the last steps. mfu: share of the peak FLOP/s; None where the peak is unknown.
    memory_bytes: the most that any rank holds. step_seconds: the wall time of this step.
    loss_scale, skipped_steps: of fp16 alone: this step's scale, and how many steps were left out since the run began.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    step_seconds: float
    loss_scale: float | None = None
    skipped_steps: int | None = None

    def record(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl, without what only another precision has."""
        return {
            key: value for key, value in asdict(self).items() if value is not None or key not in _FP16_ONLY
        }


@dataclass(frozen=True)
class ValidationMetrics:
    """A validation with the weights after `step` steps.

    loss: the mean over every counted token of all sets. tokens: their weight. sets: each set's mean, by name.
    """

    step: int
    loss: float
    tokens: float
    seconds: float
    sets: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large for a number."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def record(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl; sets by name only where there are several."""
        several = self.sets if len(self.sets) > 1 else {}
        return {
            "validation_loss": self.loss,
            "validation_perplexity": self.perplexity,
            "validation_tokens": round(self.tokens),
            "validation_seconds": self.seconds,
            **{f"validation_loss_{name}": loss for name, loss in several.items()},
        }
