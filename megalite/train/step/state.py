"""TrainerState and StepReport: where a run stands, and what one step gave."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands. The data position is `samples`, one global counter.

    best_loss, best_step: the lowest validation loss, and after which step it was found. improved_loss: the validation
    loss of the last improvement by validation.minimum_improvement or more, from which patience counts.
    skipped_steps: those whose update was left out, or undone by a rollback. rollbacks: after which step the run
    returned to the weights of which step. idle_experts: `RouterLoad.idle_experts` at the checkpoint from which the run
    goes on. recent_losses: `LossSpikes.losses`, in a checkpoint alone.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    improved_loss: float | None = None
    validations_without_improvement: int = 0
    idle_experts: list[list[int]] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    rollbacks: list[list[int]] = field(default_factory=list)

    def advanced(self, *, samples: int, tokens: int, skipped: bool) -> "TrainerState":
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped_steps=self.skipped_steps + skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
        )

    def rolled_back(self, there: "TrainerState") -> "TrainerState":
        """Return the state with the weights of an earlier one: as if all steps since then had been skipped."""
        return replace(
            self,
            skipped_steps=there.skipped_steps + self.step - there.step,
            skipped_in_a_row=0,
            rollbacks=[*self.rollbacks, [self.step, there.step]],
        )

    def validated(self, loss: float, minimum_improvement: float) -> "TrainerState":
        """Return the state after a validation at this step; a loss that is not finite is no improvement."""
        state = self
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            state = replace(state, best_loss=loss, best_step=self.step)
        before = math.inf if self.improved_loss is None else self.improved_loss
        if math.isfinite(loss) and loss < before and before - loss >= minimum_improvement:
            return replace(state, improved_loss=loss, validations_without_improvement=0)
        return replace(state, validations_without_improvement=self.validations_without_improvement + 1)


@dataclass(frozen=True)
class StepReport:
    """The result of one step: the loss before its update, the gradient norm before clipping, and its time.

    batch_tokens: the positions of the global batch, of sequence_length each row; tokens: since the start of the run.
    data_seconds: the part of step_seconds in which this rank waited for a batch. loss_scale: of this step.
    overflow: the first tensor with a gradient that is not finite, for which the step was left out. loss_spike: by how
    much the loss exceeds its running median, None: it is no spike. skipped_for: the setting that left the update out,
    "nonfinite" or "loss_spike". rolled_back_to: the step whose weights came back. skipped_samples: the first and the
    end of those that have no effect on the weights.
    flags: which of the flags given to the step any rank raised. figures: of the objective, by name. layers: the norms
    of a step that monitor.layers_every records, by name. epoch: the epoch of the data that ends with this step.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    batch_tokens: int
    sequence_length: int
    step_seconds: float
    data_seconds: float
    loss_scale: float = 1.0
    skipped_steps: int = 0
    overflow: str | None = None
    flags: tuple[bool, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)
    epoch: int | None = None
    loss_spike: float | None = None
    skipped_for: str = ""
    rolled_back_to: int | None = None
    skipped_samples: tuple[int, int] | None = None
