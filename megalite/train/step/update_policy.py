"""Whether a step's update is made: the reactions to a gradient that is not finite, and to a spike of the loss.

"skip" makes no update of the step: weights and optimizer state stay, and their count of updates; steps, data and
learning rate go on. "rollback" also brings back the weights and the optimizer state of a checkpoint, so that no step
since then has an effect; steps, data and learning rate go on from where they are, and the samples are passed over.
All is decided from the totals of the step, which are the same on every rank.

PaLM (Chowdhery et al. 2022, section 5.1) went back to a checkpoint about 100 steps before a spike and passed over 200
to 500 batches: neither the batches nor the weights alone gave the spike. OLMo 2 (2025) skips single steps.
"""

import math
from typing import Any

from megalite.config.sections.training_section import PrecisionSettings
from megalite.errors import TrainingError
from megalite.train.optimizer.protocol import Optimizer, Update
from megalite.train.step.state import StepReport

REMEDY = (
    "lower optimizer.learning_rate, or check the data of these steps, then run the same command to resume"
)


def describe_spike(loss: float, spike: float) -> str:
    return f"the loss of {loss:.4f} is {spike:.4f} above its running median"


def describe_skip(report: StepReport) -> str:
    """Return why the update of a step was left out, as a clause."""
    if report.loss_spike is not None and report.skipped_for == "loss_spike":
        return describe_spike(report.loss, report.loss_spike)
    return f"the gradient of {report.overflow} is not finite"


def describe_result(report: StepReport) -> str:
    """Return what followed from a step whose update was left out."""
    if report.rolled_back_to is None or report.skipped_samples is None:
        return "the step is skipped"
    first, end = report.skipped_samples
    return f"the weights of step {report.rolled_back_to} are back, and samples {first:,} to {end - 1:,} have no effect"


def skip_record(report: StepReport) -> dict[str, Any]:
    """Return the fields of StepMetrics that say which samples have no effect, and why; none for a usual step."""
    if report.skipped_samples is None:
        return {}
    first, end = report.skipped_samples
    return {
        "skipped_for": report.skipped_for,
        "first_skipped_sample": first,
        "skipped_samples": end - first,
        "rolled_back_to": report.rolled_back_to,
    }


def limit_reached(training: PrecisionSettings, report: StepReport, skipped_in_a_row: int) -> str:
    """Return why a run ends that skips step after step, and does not roll back; empty if it goes on."""
    skips = report.skipped_for != "" and getattr(training, report.skipped_for) == "skip"
    if not skips or skipped_in_a_row < training.nonfinite_limit:
        return ""
    return f"{skipped_in_a_row} steps in a row were skipped (training.nonfinite_limit)"


def skip_spike(
    training: PrecisionSettings, optimizer: Optimizer, loss: float, spike: float | None, squared_norm: float
) -> Update | None:
    """Leave out the update of a step whose loss is a spike; None if the settings ask for no more than a report.

    spike: by how much the loss exceeds its running median; None: it is no spike. Raises TrainingError to stop the run.
    """
    if spike is None or training.loss_spike == "report":
        return None
    if training.loss_spike == "stop":
        raise TrainingError(
            f"{describe_spike(loss, spike)} (training.loss_spike): no weight was changed; {REMEDY};"
            ' training.loss_spike = "skip" or "rollback" passes over such steps'
        )
    # ZeRO computes the norm in the update.
    norm = math.sqrt(squared_norm) / optimizer.loss_scale or math.nan
    optimizer.skip()
    return Update(norm, "loss_spike")
