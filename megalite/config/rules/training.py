"""Rules over [training]: the length of the run and of its sequences."""

from collections.abc import Iterator

from megalite.config.validate import Facts
from megalite.errors import Problem


def length_is_given_once(facts: Facts) -> Iterator[Problem]:
    steps, epochs = facts.training.steps, facts.training.epochs
    if steps is None and epochs is None:
        yield Problem(
            "training.steps", "the length of the run is not set", "set training.steps or training.epochs"
        )
    elif steps is not None and epochs is not None:
        message = f"{steps} stands beside training.epochs = {epochs}"
        yield Problem(
            "training.steps", message, "set one of the two; on the command line `none` takes the other away"
        )


def sequences_fit_the_model(facts: Facts) -> Iterator[Problem]:
    length, longest = facts.training.sequence_length, facts.model.max_position_embeddings
    if length > longest:
        message = f"{length} is longer than model.max_position_embeddings = {longest}"
        yield Problem("training.sequence_length", message, "shorten the one or raise the other")


TRAINING_RULES = (length_is_given_once, sequences_fit_the_model)
