"""Solved examples in front of a question. No torch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.evaluate.questions import Question


@dataclass(frozen=True)
class FewShot:
    """Examples to draw from. count: the examples in front of each question. seed: the same one draws the same."""

    pool: Sequence[Question] = ()
    count: int = 0
    seed: int = 0

    def prompt(self, question: Question, number: int) -> str:
        """Return the text in front of the answer to question `number`; the question itself is no example."""
        others = [each for each in self.pool if each.context != question.context]
        # Keyed by the question's number, so that ranks which share the questions draw alike.
        drawn = random.Random(f"{self.seed} {number}").sample(others, min(self.count, len(others)))
        return "".join(f"{each.context} {each.answer}\n\n" for each in drawn) + question.context
