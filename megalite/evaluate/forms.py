"""The forms of task files: which columns a row has, and the question that they make. No torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megalite.evaluate.questions import ChoiceQuestion, CodeProblem, OpenQuestion
from megalite.evaluate.rows import LETTERS, Row

Kind = Literal["multiple_choice", "exact_match", "code"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "exact_match", "code")
MARK = "####"


@dataclass(frozen=True)
class Form:
    """A form of file.

    fields: the columns that every row has, by which a file is recognised. idle: those of published files that no
    question needs.
    """

    kind: Kind
    fields: tuple[str, ...]
    question: Callable[[Row], ChoiceQuestion | OpenQuestion | CodeProblem]
    idle: tuple[str, ...] = ()


def _hellaswag(row: Row) -> ChoiceQuestion:
    """Zellers et al., "HellaSwag", 2019; the text as lm_eval makes it."""
    begun = f"{row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    context = _without_brackets(f"{row.text('activity_label')}: {begun}")
    endings = row.texts("endings")
    return ChoiceQuestion(context, tuple(map(_without_brackets, endings)), row.choice("label", len(endings)))


def _without_brackets(text: str) -> str:
    """Remove the marks of WikiHow's pages."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: Row) -> ChoiceQuestion:
    """Clark et al., "Think you have solved question answering?", 2018: choices with labels of their own."""
    question, choices = row.value("question"), row.value("choices") if row.has("choices") else None
    # The files of the publisher hold the choices within the question, one object each.
    if isinstance(question, Mapping):
        inside: Mapping[str, Any] = question
        question, choices = inside.get("stem"), inside.get("choices")
        _require_known(row, "question", inside, ("stem", "choices"))
    if not isinstance(question, str):
        raise row.wrong("question", "holds no text", "fix the row")
    if isinstance(choices, list) and all(isinstance(each, Mapping) for each in choices):
        for each in choices:
            _require_known(row, "choices", each, ("text", "label"))
        choices = {key: [each.get(key) for each in choices] for key in ("text", "label")}
    if not isinstance(choices, Mapping) or not {"text", "label"} <= choices.keys():
        raise row.wrong("choices", "holds no texts with labels", 'write {"text": [...], "label": [...]}')
    _require_known(row, "choices", choices, ("text", "label"))
    inner = Row(choices, f"{row.where}: choices", {})
    texts, labels = inner.texts("text"), inner.texts("label")
    if len(texts) != len(labels):
        raise row.wrong(
            "choices", f"has {len(texts)} texts and {len(labels)} labels", "write one label a text"
        )
    return ChoiceQuestion(_asked(question), texts, row.label("answerKey", labels))


def _require_known(row: Row, column: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise DataError for a key of a table within a column that has no meaning here."""
    if unknown := sorted(table.keys() - set(known)):
        message = f"has the key {unknown[0]!r}, which megalite does not read"
        raise row.wrong(column, message, f"remove it; {' and '.join(known)} are read")


def _mmlu(row: Row) -> ChoiceQuestion:
    """Hendrycks et al., "Measuring Massive Multitask Language Understanding", 2021: the model chooses a letter."""
    choices = row.texts("choices")
    if len(choices) > len(LETTERS):
        raise row.wrong("choices", f"has {len(choices)} choices", f"write at most {len(LETTERS)}")
    letters = tuple(LETTERS[: len(choices)])
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
    context = f"{row.text('question').strip()}\n{listed}\nAnswer:"
    return ChoiceQuestion(context, letters, row.choice("answer", len(letters)))


def _plain_choices(row: Row) -> ChoiceQuestion:
    choices = row.texts("choices")
    return ChoiceQuestion(row.text("context"), choices, row.choice("answer", len(choices)))


def _gsm8k(row: Row) -> OpenQuestion:
    """Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021: the number behind the mark is compared."""
    answer = row.text("answer")
    if MARK not in answer:
        raise row.wrong(
            "answer",
            f"has no {MARK} before its number",
            f'end the answer with "{MARK} 42", or use --form plain',
        )
    return OpenQuestion(_asked(row.text("question")), answer, answer.rpartition(MARK)[2].strip())


def _plain_answer(row: Row) -> OpenQuestion:
    answer = row.text("answer").strip()
    if not answer:
        raise row.wrong("answer", "is empty", "fix or remove the row")
    return OpenQuestion(_asked(row.text("question")), answer, answer)


def _humaneval(row: Row) -> CodeProblem:
    """Chen et al., "Evaluating Large Language Models Trained on Code", 2021."""
    name = row.text("task_id") if row.has("task_id") else row.where
    entry_point = row.text("entry_point")
    if not entry_point.isidentifier():
        raise row.wrong("entry_point", f"{entry_point!r} is no name of a function", "fix the row")
    return CodeProblem(name, row.text("prompt"), row.text("test"), entry_point)


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


# In the order in which a file is recognised.
FORMS: Mapping[str, Form] = {
    "hellaswag": Form(
        "multiple_choice",
        ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        _hellaswag,
        idle=("ind", "ctx", "source_id", "split", "split_type"),
    ),
    "arc": Form("multiple_choice", ("question", "answerKey"), _arc, idle=("id",)),
    "mmlu": Form("multiple_choice", ("question", "choices", "answer"), _mmlu, idle=("subject",)),
    "choices": Form("multiple_choice", ("context", "choices", "answer"), _plain_choices),
    "gsm8k": Form("exact_match", ("question", "answer"), _gsm8k),
    "plain": Form("exact_match", ("question", "answer"), _plain_answer),
    "humaneval": Form("code", ("prompt", "test", "entry_point"), _humaneval, idle=("canonical_solution",)),
}
