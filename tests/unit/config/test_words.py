"""The words of help and errors: plain sentences, short lines, and remedies whose settings exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.config.sections.describe import item_model, section_models, setting
from tests.unit.config.test_rules import CASES

PACKAGE = Path(__file__).parents[3] / "megalite"
SPEAKING = ("cli", "config", "launcher", "train", "monitor", "data", "checkpoint", "generate")
# A sentence that begins with its object or a question needs a second reading.
TURNED = re.compile(r"(?:^|[.:;!?]\s+)(?:Of|What) ")
UNCLEAR = re.compile(r"\b(likewise|so many|manieth|somebody|nobody)\b")
DESCRIPTIONS = {
    f"{section}.{key}": info.description or ""
    for section, model in section_models().items()
    for key, info in model.model_fields.items()
}
for table in ("data.blend", "data.curriculum", "optimizer.groups"):
    fields = item_model(setting(table).annotation).model_fields
    DESCRIPTIONS |= {f"{table}.{key}": info.description or "" for key, info in fields.items()}
SETTING = re.compile(
    rf"\b(?:{'|'.join(section_models())})\.(?!toml\b|layers\b|embed_tokens\b|norm\b|json)[a-z_]+\b"
)


def spoken(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a module that is no docstring; the values in an f-string are {}."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))


def turned(text: str) -> bool:
    return bool(TURNED.search(text) or UNCLEAR.search(text))


def test_no_sentence_of_help_or_errors_is_turned() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text[:80]}"
        for name in SPEAKING
        for path in sorted((PACKAGE / name).rglob("*.py"))
        for line, text in spoken(ast.parse(path.read_text(encoding="utf-8")))
        if turned(text)
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    ["Of epochs, those left", "a problem; What is left of it", "the same likewise", "it takes so many"],
)
def test_a_turned_sentence_is_seen(text: str) -> None:
    assert turned(text)
    assert list(spoken(ast.parse(f'"""Of a docstring."""\nraise ValueError(f"{{x}}: {text}")\n'))) == [
        (2, f"{{}}: {text}")
    ]


@pytest.mark.parametrize("key", DESCRIPTIONS)
def test_a_help_line_is_a_short_noun_or_verb_phrase(key: str) -> None:
    text = DESCRIPTIONS[key]
    limit = 105 if text.endswith("default: the family's") else 90
    assert 0 < len(text) <= limit, len(text)
    first = text.split()[0].rstrip(",:").lower()
    assert first not in {
        "of",
        "what",
        "how",
        "which",
        "it",
        "that",
        "the",
        "a",
        "an",
        "as",
        "default",
        "when",
        "whether",
    }
    assert not text.endswith(".")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.said[:60])
def test_a_rule_has_a_remedy_that_can_be_typed(case: object) -> None:
    said = case.said  # type: ignore[attr-defined]
    _, _, remedy = said.rpartition("; ")
    assert remedy and "None" not in remedy, said
    named = {name for name in SETTING.findall(said) if not name.startswith("deepspeed.")}
    assert named <= DESCRIPTIONS.keys(), named - DESCRIPTIONS.keys()
