"""The text in front of an answer: solved examples and the question, plain or in a chat template. No torch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.evaluate.encoding import TextEncoder
from megalite.evaluate.questions import ChoiceQuestion, OpenQuestion, Question
from megalite.generation.prompts import Chat
from megalite.generation.stops import NO_STOPS, Stops


@dataclass(frozen=True)
class FewShot:
    """Examples to draw from, and the form of a question.

    count: the examples in front of each question. seed: the same one draws the same. chat: asks in this template, as
    lm_eval's --apply_chat_template: one message of the user with the examples and the question. turns: each example
    is a message and its answer instead, as lm_eval's --fewshot_as_multiturn.
    """

    pool: Sequence[Question] = ()
    count: int = 0
    seed: int = 0
    chat: Chat | None = None
    turns: bool = False

    def prompt(self, question: ChoiceQuestion | OpenQuestion, number: int) -> str:
        """Return the text in front of the answer to question `number`; the question itself is no example."""
        others = [each for each in self.pool if each.context != question.context]
        # Keyed by the question's number, so that ranks which share the questions draw alike.
        drawn = random.Random(f"{self.seed} {number}").sample(others, min(self.count, len(others)))
        if self.chat is not None and self.turns:
            pairs = [(("user", each.context), ("assistant", each.answer)) for each in drawn]
            return self._asked([*(turn for pair in pairs for turn in pair), ("user", question.context)])
        text = "".join(f"{each.context} {each.answer}\n\n" for each in drawn) + question.context
        return text if self.chat is None else self._asked([("user", text)])

    def encoder(self, tokenizer: Tokenizer) -> TextEncoder:
        """Return what encodes the prompts: a chat template writes the start token itself, as in training."""
        return TextEncoder(tokenizer, adds_start=None if self.chat is None else False)

    @property
    def delimiter(self) -> str:
        """The text between a prompt and its answer, as lm_eval has it."""
        return " " if self.chat is None else ""

    @property
    def stops(self) -> Stops:
        """The ends of an answer in the form of the chat template."""
        return NO_STOPS if self.chat is None else self.chat.stops

    def _asked(self, turns: Sequence[tuple[str, str]]) -> str:
        assert self.chat is not None
        return self.chat.prompt_text(
            [{"role": role, "content": text} for role, text in turns], "the question"
        )
