"""The questions of a task, whatever the form of its file. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with choices. context: the text before a choice. gold: the index of the right choice."""

    context: str
    choices: tuple[str, ...]
    gold: int

    @property
    def answer(self) -> str:
        """The right answer as a few-shot example shows it."""
        return self.choices[self.gold]


@dataclass(frozen=True)
class OpenQuestion:
    """A question whose answer is generated. answer: with its solution. final: the part that is compared."""

    context: str
    answer: str
    final: str


@dataclass(frozen=True)
class CodeProblem:
    """A function to complete. prompt: its head. test: a program that defines check(candidate)."""

    name: str
    prompt: str
    test: str
    entry_point: str


Question = ChoiceQuestion | OpenQuestion
