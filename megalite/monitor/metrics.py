"""The metrics of a step, a validation and a save, as console, metrics.jsonl and the other sinks show them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FIGURES = ("reward_accuracy", "reward_margin", "expert_load")
"""The names that StepMetrics.figures may have, and that a line shows."""
ROUTER_FIGURES = ("router_entropy", "idle_experts", "router_loss")
"""Figures that records have, and no line."""
SELF_CHECK = "self_check_seconds"
"""Seconds of the last comparison of all copies (monitor.self_check_every), in the record of the next step."""
MEMORY_COPY = "memory_copy_seconds"
"""Seconds of waiting for a copy in memory (checkpoint.in_memory_every), in the record of the next step."""
AT_THE_START = ("parameters", "trained_parameters", "frozen_parameters", "total_steps")
"""The keys in the first record of every start: the values of the whole model with its adapter, the run's last step."""
OF_RANKS = (
    *("communication_share", "communication_share_max", "slow_rank", "slow_rank_factor", "alarm"),
    *("card_utilisation", "cards_watts", "card_celsius_max"),
)
TEXTS = ("alarm", "skipped_for")
"""The keys whose values are texts."""
_COMMUNICATION = "communication_share/"
_GROUP_RATE = "learning_rate/"
_NORMS = ("grad_norm/", "weight_norm/", "update_ratio/", "expert_load/")
_OPTIONAL = (
    *("loss_scale", "skipped_steps", "reserved_bytes", "loss_spike", "epoch", "epoch_loss"),
    *("skipped_for", "first_skipped_sample", "skipped_samples", "rolled_back_to"),
)


@dataclass(frozen=True)
class StepMetrics:
    """One step of a run; the field names are the keys of metrics.jsonl.

    step: counted from 1. loss: mean over the unmasked tokens of the global batch, before the update.
    grad_norm: global L2 norm before clipping. tokens: seen since the start of the run, all ranks together.
    tokens_per_second: of all ranks, over the last steps. mfu: share of the peak FLOP/s; None: unknown peak.
    memory_bytes: the maximum over ranks of the peak, of a process since its start, of a device since the last line.
    step_seconds: wall time of this step. data_seconds: the part of it that rank 0 waited for its batch.
    loss_scale: with fp16 only. skipped_steps: skipped since the start of the run; None if no step can be skipped.
    reserved_bytes: with a device only, the maximum over ranks of the bytes reserved by torch's allocator.
    group_rates: the learning rate of each [[optimizer.groups]] table, by its pattern; their names in files are
    learning_rate/PATTERN. custom: metrics of callbacks, by name. figures: what the loss of preferences has besides,
    and the load of a mixture's experts.
    of_ranks: the fields of OF_RANKS, as of the last report. layers: the norms that monitor.layers_every records, by
    name. loss_spike: by how much a spike of the loss exceeds the running median. epoch, epoch_loss: the epoch that
    ends with this step, and the mean loss of its steps. skipped_for, rolled_back_to: as of StepReport.
    first_skipped_sample, skipped_samples: the position and the number of the samples without an effect on the weights.
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
    figures: Mapping[str, float] = field(default_factory=dict)
    group_rates: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)
    of_ranks: Mapping[str, Any] = field(default_factory=dict)
    loss_spike: float | None = None
    epoch: int | None = None
    epoch_loss: float | None = None
    skipped_for: str | None = None
    first_skipped_sample: int | None = None
    skipped_samples: int | None = None
    rolled_back_to: int | None = None

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl, without metrics that this run does not have."""
        own = asdict(self)
        custom, figures, rates = own.pop("custom"), own.pop("figures"), own.pop("group_rates")
        layers, of_ranks = own.pop("layers"), own.pop("of_ranks")
        return (
            {key: value for key, value in own.items() if value is not None or key not in _OPTIONAL}
            | {f"{_GROUP_RATE}{pattern}": rate for pattern, rate in rates.items()}
            | figures
            | of_ranks
            | layers
            | custom
        )


@dataclass(frozen=True)
class ValidationMetrics:
    """A validation with the weights after `step` steps.

    loss: mean over the unmasked tokens of all data sets, or over the pairs. tokens: their total weight.
    sets: name -> mean of a data set. figures: those of preferences, by name; empty for losses of tokens.
    """

    step: int
    loss: float
    tokens: float
    seconds: float
    sets: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss); inf if it overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.jsonl; single data sets only if there are several."""
        several = self.sets if len(self.sets) > 1 else {}
        return {
            "validation_loss": self.loss,
            **self._of_kind(),
            "validation_seconds": self.seconds,
            **{f"validation_loss_{name}": loss for name, loss in several.items()},
        }

    def _of_kind(self) -> dict[str, float]:
        if self.figures:
            own = {f"validation_{name}": value for name, value in self.figures.items()}
            return {**own, "validation_pairs": round(self.tokens)}
        return {"validation_perplexity": self.perplexity, "validation_tokens": round(self.tokens)}


@dataclass(frozen=True)
class SaveMetrics:
    """A published checkpoint, and its cost.

    step: the step after which it was taken. stall_seconds: total time that training waited for it.
    write_seconds: time until the slowest rank's file was on disk.
    staging_bytes: the maximum over ranks of the copy for an asynchronous save; 0 if the save was synchronous.
    steps_during_write: the number of steps during the write.
    slowdown: the duration of these steps divided by that of other steps; None without other steps.
    """

    step: int
    path: Path
    stall_seconds: float
    write_seconds: float
    staging_bytes: int = 0
    steps_during_write: int = 0
    slowdown: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the fields for metrics.jsonl, in the record of the first step that ends after publishing."""
        return {
            "checkpoint_step": self.step,
            "checkpoint_stall_seconds": self.stall_seconds,
            "checkpoint_write_seconds": self.write_seconds,
            "checkpoint_staging_bytes": self.staging_bytes,
            "checkpoint_slowdown": self.slowdown,
        }


def is_own_metric(name: str) -> bool:
    """Whether a key of metrics.jsonl is built in, so that callbacks cannot use it."""
    return name in {
        *FIGURES,
        *ROUTER_FIGURES,
        *AT_THE_START,
        MEMORY_COPY,
        SELF_CHECK,
        *OF_RANKS,
        *(each.name for each in fields(StepMetrics)),
    } or name.startswith(("validation_", "checkpoint_", _COMMUNICATION, _GROUP_RATE, *_NORMS))


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by the names of their curves: train/loss, validation/loss, those of callbacks."""
    return {
        _curve(key): value
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float)
    }


def _curve(key: str) -> str:
    for kind in ("validation", "checkpoint"):
        if key.startswith(f"{kind}_"):
            return f"{kind}/{key.removeprefix(f'{kind}_')}"
    return f"train/{key}" if is_own_metric(key) else key
