"""Multiple choice: the likeliest of the given answers, as lm_eval scores them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megalite.errors import DataError
from megalite.evaluate.encoding import pair_window
from megalite.evaluate.few_shot import FewShot
from megalite.evaluate.questions import ChoiceQuestion
from megalite.evaluate.scoring import Advance, ignore, scores
from megalite.evaluate.statistics import Rate
from megalite.generation.loaded import LoadedModel


@dataclass(frozen=True)
class ChoiceFigures:
    """acc: the likeliest choice is the right one; acc_norm: the likeliest by log-likelihood per character.

    truncated: the questions that lost text at their beginning, since they are longer than the model.
    """

    questions: int
    acc: Rate
    acc_norm: Rate
    truncated: int


def multiple_choice(
    loaded: LoadedModel,
    questions: Sequence[ChoiceQuestion],
    few_shot: FewShot,
    batch_size: int,
    advance: Advance = ignore,
) -> ChoiceFigures:
    """Score the choices of all questions; the same figures on every rank. Collective over the world.

    Raises DataError for a choice without tokens.
    """
    longest, windows, truncated = loaded.config.longest_sequence, [], 0
    encoder = few_shot.encoder(loaded.tokenizer)
    for number, question in enumerate(questions):
        prompt = few_shot.prompt(question, number)
        pairs = [encoder.pair(prompt, f"{few_shot.delimiter}{choice}") for choice in question.choices]
        if not all(continuation for _, continuation in pairs):
            raise DataError(f"question {number + 1}: a choice has no tokens; write its text")
        truncated += any(len(context) + len(choice) > longest + 1 for context, choice in pairs)
        windows += [pair_window(*pair, longest) for pair in pairs]
    found = iter(scores(loaded.replica, windows, batch_size, advance))
    right, right_by_character = [], []
    for question in questions:
        likelihoods = np.array([next(found).log_likelihood for _ in question.choices])
        lengths = np.array([len(choice) for choice in question.choices])
        right.append(float(likelihoods.argmax() == question.gold))
        right_by_character.append(float((likelihoods / lengths).argmax() == question.gold))
    return ChoiceFigures(len(questions), Rate.of(right), Rate.of(right_by_character), truncated)
