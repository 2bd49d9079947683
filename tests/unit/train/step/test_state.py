"""The saved state of a run: its validations and its skipped steps."""

import math

from megalite.train.step.state import TrainerState


def after(losses: list[float], minimum: float = 0.0) -> TrainerState:
    state = TrainerState()
    for loss in losses:
        state = state.advanced(samples=8, tokens=64, skipped=False).validated(loss, minimum)
    return state


def test_the_best_is_the_lowest_and_patience_counts_from_the_last_improvement() -> None:
    state = after([3.0, 2.0, 2.5, 2.0])
    assert (state.best_loss, state.best_step) == (2.0, 2)
    assert state.validations_without_improvement == 2


def test_a_small_step_down_is_the_best_and_no_improvement() -> None:
    state = after([3.0, 2.95, 2.9], minimum=0.2)
    assert (state.best_loss, state.best_step) == (2.9, 3)
    assert state.validations_without_improvement == 2
    # Slow progress adds up: what counts is the distance to the last improvement.
    state = after([3.0, 2.9, 2.8], minimum=0.15)
    assert (state.improved_loss, state.validations_without_improvement) == (2.8, 0)


def test_what_is_not_finite_is_no_improvement() -> None:
    state = after([math.nan, math.inf])
    assert state.best_loss is None and state.validations_without_improvement == 2
    state = after([math.nan, 3.0])
    assert (state.best_loss, state.validations_without_improvement) == (3.0, 0)


def test_a_step_that_counts_ends_a_row_of_skipped_ones() -> None:
    state = TrainerState()
    for skipped in (True, True, False, True):
        state = state.advanced(samples=8, tokens=64, skipped=skipped)
    assert (state.step, state.samples, state.skipped_steps, state.skipped_in_a_row) == (4, 32, 3, 1)
