"""Rules over [training]: the length of the run and of its sequences."""

from collections.abc import Iterator

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import adapted_shape
from megalite.config.sections.duration import seconds_of
from megalite.config.sections.shape_settings import longest_sequence_setting
from megalite.config.sections.toml import format_value
from megalite.errors import Problem


def length_is_given_once(run: CheckedRun) -> Iterator[Problem]:
    steps, epochs = run.training.steps, run.training.epochs
    if steps is None and epochs is None:
        yield Problem(
            "training.steps",
            "the length of the run is not set",
            "set training.steps or training.epochs",
            {"training.epochs": 1},
        )
    elif steps is not None and epochs is not None:
        message = f"{steps} and training.epochs = {epochs} are both set"
        remedy = (
            "set only one of them; on the command line --training.steps unset removes a value of the file"
        )
        yield Problem("training.steps", message, remedy, {"training.epochs": None})


def sequences_fit_the_model(run: CheckedRun) -> Iterator[Problem]:
    shape = adapted_shape(run)
    length, longest = run.training.sequence_length, shape.longest_sequence
    if length > longest:
        message = f"{length} is longer than {longest_sequence_setting(shape)} = {longest}"
        remedy = f"use at most {longest}, or raise model.max_position_embeddings"
        if longest < 1:
            remedy = "lower adapter.tokens"
        cure = {"training.sequence_length": longest} if longest >= 1 else {}
        yield Problem("training.sequence_length", message, remedy, cure)


def tf32_is_a_way_to_multiply_fp32(run: CheckedRun) -> Iterator[Problem]:
    precision = run.training.precision
    if run.training.tf32 and precision != "fp32":
        message = f'true has no effect with training.precision = "{precision}"'
        yield Problem.reset(
            "training.tf32", message, 'set training.precision = "fp32", or delete the setting'
        )


def stop_after_is_a_duration(run: CheckedRun) -> Iterator[Problem]:
    duration = run.training.stop_after
    if duration is None:
        return
    try:
        seconds_of(duration)
    except ValueError as error:
        shown = format_value(duration)
        yield Problem(
            "training.stop_after", f"{shown} {error}", 'write "23h30m", "45m" or a number of seconds'
        )
