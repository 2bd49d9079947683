"""The numbers of one step, as every reader of a run sees them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

_OPTIONAL = ("loss_scale", "skipped_steps", "reserved_bytes")


@dataclass(frozen=True)
class StepMetrics:
    """One step of a run; the field names are the keys of metrics.jsonl.

    step: counted from 1. loss: mean over the counted tokens of the global batch, before the step's update.
    grad_norm: global L2 norm before clipping. tokens: seen since the run began, all ranks together.
    tokens_per_second: of all ranks, over the last steps. mfu: share of the peak FLOP/s; None where the peak is unknown.
    memory_bytes: the most that any rank held: of a process since it began, of a device since the last line.
    step_seconds: the wall time of this step.
    data_seconds: of these, what rank 0 waited for its batch.
    loss_scale: of fp16 alone. skipped_steps: how many were left out since the run began, where any may be.
    reserved_bytes: of a device alone, what torch's allocator reserved for memory_bytes, the most of any rank.
    custom: what callbacks add, by their own names.
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
    reserved_bytes: int | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """As they are shown as curves, by tag."""
        shown = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "loss_scale", "skipped_steps")
        values = {name: getattr(self, name) for name in shown}
        return {f"train/{name}": value for name, value in values.items() if value is not None} | dict(
            self.custom
        )

    def record(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl, without what another run has."""
        own = asdict(self)
        custom = own.pop("custom")
        return {
            key: value for key, value in own.items() if value is not None or key not in _OPTIONAL
        } | custom


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

    def scalars(self) -> dict[str, float]:
        """As they are shown as curves, by tag."""
        several = self.sets if len(self.sets) > 1 else {}
        curves = {"validation/loss": self.loss, "validation/perplexity": self.perplexity}
        return curves | {f"validation/loss_{name}": loss for name, loss in several.items()}

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


@dataclass(frozen=True)
class SaveMetrics:
    """A checkpoint that was published, and what it cost.

    step: after which it was taken. stall_seconds: what training waited for it, all in all. write_seconds: until the
    slowest rank's file was on the disk. staging_bytes: the copy that training went on beside, of the rank that holds
    most; 0 where training waited. steps_beside: made while it was written. slowdown: how many times as long as others
    these took; None where there was none to compare.
    """

    step: int
    path: Path
    stall_seconds: float
    write_seconds: float
    staging_bytes: int = 0
    steps_beside: int = 0
    slowdown: float | None = None

    def record(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl, in the record of the first step that ends after it was published."""
        return {
            "checkpoint_step": self.step,
            "checkpoint_stall_seconds": self.stall_seconds,
            "checkpoint_write_seconds": self.write_seconds,
            "checkpoint_staging_bytes": self.staging_bytes,
            "checkpoint_slowdown": self.slowdown,
        }


def is_own_metric(name: str) -> bool:
    """Whether a key of metrics.jsonl is one that every run may have."""
    return name in {each.name for each in fields(StepMetrics)} or name.startswith(
        ("validation_", "checkpoint_")
    )
