"""Brings back the weights of a checkpoint after a spike of the loss or a gradient that is not finite."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.folder import older_checkpoints, require_whole
from megalite.errors import CheckpointError, TrainingError
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep
from megalite.train.step.update_policy import REMEDY, describe_skip


def rolls_back(trainer: TrainStep, report: StepReport) -> bool:
    """Return whether the settings ask for a rollback after a step."""
    return report.skipped_for != "" and getattr(trainer.config.training, report.skipped_for) == "rollback"


def roll_back(trainer: TrainStep, saved: Path | None, report: StepReport) -> StepReport:
    """Bring back the weights of a checkpoint and return the report of the step with it. Collective.

    Rollbacks are in a row if each is within training.spike_window steps of the last one: the weights of its checkpoint
    may be at fault themselves, so each goes to a checkpoint before that, as long as there is one. Before the first
    checkpoint the step is skipped.

    saved: the last published checkpoint. Raises TrainingError after training.rollback_limit in a row.
    """
    training, state = trainer.config.training, trainer.state
    in_a_row = _in_a_row(state.rollbacks, state.step, training.spike_window)
    if saved is None:
        if state.skipped_in_a_row < training.nonfinite_limit:
            return report
        reached = f"{state.skipped_in_a_row} steps in a row were skipped (training.nonfinite_limit)"
    elif len(in_a_row) >= training.rollback_limit:
        steps = ", ".join(str(step) for _, step in in_a_row)
        reached = (
            f"{len(in_a_row)} rollbacks in a row, to step {steps}, did not help (training.rollback_limit)"
        )
    else:
        source = _source(saved, in_a_row) if trainer.mesh.rank == 0 else None
        there = trainer.roll_back(trainer.mesh.broadcast_object(source))
        return replace(
            report,
            skipped_steps=trainer.state.skipped_steps,
            rolled_back_to=there.step,
            skipped_samples=(there.samples, trainer.state.samples),
        )
    raise TrainingError(f"step {state.step}: {reached}: {describe_skip(report)}; {REMEDY}")


def _in_a_row(rollbacks: Sequence[Sequence[int]], step: int, window: int) -> list[Sequence[int]]:
    """Return the last of the rollbacks, each at most `window` steps before the next one, the last one before `step`."""
    in_a_row: list[Sequence[int]] = []
    for rollback in reversed(rollbacks):
        if step - rollback[0] > window:
            break
        in_a_row.insert(0, rollback)
        step = rollback[0]
    return in_a_row


def _source(saved: Path, in_a_row: Sequence[Sequence[int]]) -> Path:
    """Return the newest whole checkpoint before that of the last rollback in a row; without one the last checkpoint."""
    for checkpoint in older_checkpoints(saved) if in_a_row else ():
        try:
            if require_whole(checkpoint).step < in_a_row[-1][1]:
                return checkpoint
        except CheckpointError:
            continue
    return saved
