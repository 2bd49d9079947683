"""The numbers of one step, as every reader of a run sees them."""

from dataclasses import asdict, dataclass
from typing import Any

_FP16_ONLY = ("loss_scale", "skipped_steps")


@dataclass(frozen=True)
class StepMetrics:
    """One step of a run; the field names are the keys of metrics.jsonl.

    step: counted from 1. loss: mean over the counted tokens of the global batch, before the step's update.
    grad_norm: global L2 norm before clipping. tokens: seen since the run began, all ranks together.
    tokens_per_second: of all ranks, over the last steps. mfu: share of the peak FLOP/s; None where the peak is unknown.
    memory_bytes: the most that any rank holds. step_seconds: the wall time of this step.
    data_seconds: of these, what rank 0 waited for its batch.
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
    data_seconds: float
    loss_scale: float | None = None
    skipped_steps: int | None = None

    def record(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl, without what only another precision has."""
        return {
            key: value for key, value in asdict(self).items() if value is not None or key not in _FP16_ONLY
        }
