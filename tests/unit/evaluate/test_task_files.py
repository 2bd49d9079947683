"""The known forms of task files, and the message for each mistake in one."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megalite.errors import DataError
from megalite.evaluate.few_shot import FewShot
from megalite.evaluate.questions import ChoiceQuestion, CodeProblem, OpenQuestion
from megalite.evaluate.task_file import TaskFile, questions

HELLASWAG = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "endings": ["is using wrap [substeps] to wrap skis.", "starts pulling up  roofing."],
    "label": "1",
}
ARC = {"question": "Why?", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "3"}
PUBLISHED_ARC = {
    "question": {"stem": "Why?", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]},
    "answerKey": "B",
}
MMLU = {"question": "Which? ", "subject": "law", "choices": ["one", "two"], "answer": "B"}
WITHOUT_SUBJECT = {key: value for key, value in MMLU.items() if key != "subject"}
GSM8K = {"question": "How many?", "answer": "2 + 1,000 is <<2+1000=1002>>1,002.\n#### 1,002"}
HUMANEVAL = {"task_id": "T/0", "prompt": "def f():\n", "test": "def check(c): pass", "entry_point": "f"}
LISTED = "Which?\nA. one\nB. two\nAnswer:"
FORMS: list[tuple[str, dict[str, Any], Any]] = [
    (
        "multiple_choice",
        HELLASWAG,
        ChoiceQuestion(
            "Roof shingle removal: A man is sitting on a roof. He",
            ("is using wrap to wrap skis.", "starts pulling up roofing."),
            1,
        ),
    ),
    ("multiple_choice", ARC, ChoiceQuestion("Question: Why?\nAnswer:", ("a", "b", "c"), 2)),
    ("multiple_choice", PUBLISHED_ARC, ChoiceQuestion("Question: Why?\nAnswer:", ("a", "b"), 1)),
    ("multiple_choice", MMLU, ChoiceQuestion(LISTED, ("A", "B"), 1)),
    ("multiple_choice", WITHOUT_SUBJECT, ChoiceQuestion(LISTED, ("A", "B"), 1)),
    ("multiple_choice", MMLU | {"answer": 0}, ChoiceQuestion(LISTED, ("A", "B"), 0)),
    (
        "multiple_choice",
        {"context": "So", "choices": ["a", "b"], "answer": 1},
        ChoiceQuestion("So", ("a", "b"), 1),
    ),
    ("exact_match", GSM8K, OpenQuestion("Question: How many?\nAnswer:", GSM8K["answer"], "1,002")),
    (
        "exact_match",
        {"question": "Who?", "answer": "Tom "},
        OpenQuestion("Question: Who?\nAnswer:", "Tom", "Tom"),
    ),
    ("code", HUMANEVAL, CodeProblem("T/0", "def f():\n", "def check(c): pass", "f")),
]


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "task.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("kind", "row", "expected"), FORMS)
def test_a_form_is_recognised(tmp_path: Path, kind: Any, row: dict[str, Any], expected: Any) -> None:
    assert questions(TaskFile(written(tmp_path, row, row), kind, limit=1)) == [expected]


def test_a_parquet_file_and_columns_with_other_names(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([ARC]), tmp_path / "arc.parquet")
    assert questions(TaskFile(tmp_path / "arc.parquet", "multiple_choice")) == [FORMS[1][2]]
    row = {"stem": "So", "options": ["a", "b"], "gold": "B"}
    columns = {"context": "stem", "choices": "options", "answer": "gold"}
    found = questions(TaskFile(written(tmp_path, row), "multiple_choice", "choices", columns))
    assert found == [ChoiceQuestion("So", ("a", "b"), 1)]


BAD: list[tuple[str, Any, str]] = [
    ("multiple_choice", MMLU | {"answer": 2}, r"'answer' 2 is none of the 2 choices; use 0 to 1, or A to B"),
    ("multiple_choice", MMLU | {"answer": "C"}, r"'answer' 'C' is none of the 2 choices"),
    ("multiple_choice", MMLU | {"answer": True}, r"'answer' True is none of the 2 choices"),
    ("multiple_choice", MMLU | {"choices": ["one"]}, r"'choices' has 1 choices; write two or more"),
    ("multiple_choice", MMLU | {"choices": "one"}, r"'choices' holds text, not a list of texts"),
    ("multiple_choice", MMLU | {"question": 3}, r"'question' holds a number, not text"),
    ("multiple_choice", {"question": "Which?"}, r"no column 'choices' .*--field choices=COLUMN"),
    (
        "multiple_choice",
        ARC | {"answerKey": "D"},
        r"'answerKey' 'D' is none of the choices; use one of 1, 2, 3",
    ),
    ("multiple_choice", ["Which?"], r"the row is a list, not an object"),
    ("exact_match", GSM8K | {"answer": "1002"}, r"'answer' has no #### before its number"),
    ("code", HUMANEVAL | {"entry_point": "f()"}, r"'entry_point' 'f\(\)' is no name of a function"),
]
GOOD = {"multiple_choice": MMLU, "exact_match": GSM8K, "code": HUMANEVAL}


@pytest.mark.parametrize(("kind", "row", "message"), BAD)
def test_a_bad_row_is_named_with_line_column_and_remedy(
    tmp_path: Path, kind: Any, row: Any, message: str
) -> None:
    arc = isinstance(row, dict) and "answerKey" in row
    path = written(tmp_path, ARC if arc else GOOD[kind], row)
    with pytest.raises(DataError, match=rf"task\.jsonl, line 2: .*{message}"):
        questions(TaskFile(path, kind))


def test_an_unknown_form_an_empty_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: the columns \['x'\] are of no known form .*--form choices"):
        questions(TaskFile(written(tmp_path, {"x": 1}), "multiple_choice"))
    with pytest.raises(DataError, match=r"--task: .* has no questions"):
        questions(TaskFile(written(tmp_path), "code"))
    (tmp_path / "cut.jsonl").write_text('{"question": ')
    with pytest.raises(DataError, match=r"cut\.jsonl, line 1: not JSON"):
        questions(TaskFile(tmp_path / "cut.jsonl", "exact_match"))
    with pytest.raises(DataError, match=r"--few-shot-file: .* does not exist"):
        questions(TaskFile(tmp_path / "absent.jsonl", "exact_match", flag="--few-shot-file"))


def test_examples_are_drawn_by_seed_and_question_and_never_the_question_itself() -> None:
    pool = [ChoiceQuestion(f"Q{number}", ("a", "b"), number % 2) for number in range(6)]
    shots = FewShot(pool, 2, seed=3)
    prompts = [shots.prompt(question, number) for number, question in enumerate(pool)]
    assert prompts == [FewShot(pool, 2, seed=3).prompt(each, at) for at, each in enumerate(pool)]
    assert prompts != [FewShot(pool, 2, seed=4).prompt(each, at) for at, each in enumerate(pool)]
    for number, prompt in enumerate(prompts):
        *examples, asked = prompt.split("\n\n")
        assert asked == f"Q{number}" and len(set(examples)) == 2
        assert set(examples) <= {f"{each.context} {each.answer}" for each in pool if each.context != asked}
    assert FewShot().prompt(pool[0], 0) == "Q0"


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, row, _ in FORMS])
def test_a_column_that_no_question_reads_is_named_with_its_rows(
    tmp_path: Path, kind: Any, row: dict[str, Any]
) -> None:
    notes: list[str] = []
    path = written(tmp_path, row, row | {"weight": 0}, row | {"weight": 1, "until": "."})
    questions(TaskFile(path, kind), notes.append)
    assert notes == [
        f"note: {path}: columns without effect, and the rows that have them: 'weight' (2), 'until' (1)"
    ]


def test_the_other_columns_of_published_files_are_known(tmp_path: Path) -> None:
    notes: list[str] = []
    published = HELLASWAG | dict.fromkeys(("ind", "ctx", "source_id", "split", "split_type"), "x")
    for kind, row in (
        ("multiple_choice", published),
        ("multiple_choice", ARC | {"id": "1"}),
        ("code", HUMANEVAL | {"canonical_solution": "x"}),
    ):
        questions(TaskFile(written(tmp_path, row), kind), notes.append)  # type: ignore[arg-type]
    assert notes == []


PLANTED: list[dict[str, Any]] = [
    ARC | {"choices": ARC["choices"] | {"weight": [1, 0, 0]}},
    PUBLISHED_ARC | {"question": PUBLISHED_ARC["question"] | {"weight": 0}},
    PUBLISHED_ARC | {"question": {"stem": "Why?", "choices": [{"text": "a", "label": "A", "weight": 0}] * 2}},
]


@pytest.mark.parametrize("row", PLANTED)
def test_an_unknown_key_of_a_table_within_a_row_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"line 1: column '\w+' has the key 'weight', .* remove it; "):
        questions(TaskFile(written(tmp_path, row), "multiple_choice"))
