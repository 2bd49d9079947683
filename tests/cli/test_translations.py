"""The Chinese pages say what the English ones say: the same commands, figures and headings, and links that resolve."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.test_docs import anchors
from tests.support.documents import README, prose
from tests.support.jobs import ROOT
from tests.support.translations import (
    README_ZH,
    TRANSLATIONS,
    copy_blocks,
    fenced_blocks,
    original,
    translated,
)

HAN = r"[\u4e00-\u9fff]"
NUMBER = r"(?<![\w.])\d[\d.,]*+(?:e-?\d++)?+(?!\w| ?[万亿千])"
"""A number in the Chinese text; those of four-digit units, such as 17 million as 1700 万, are other digits."""
SPACED = re.compile(rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9%]{HAN}")
HALF_WIDTH = re.compile(rf"{HAN}[,;:?!()]|{HAN}\.(?:\s|$)")
BROKEN_BOLD = re.compile(r"\*\*[^*\n]+[\u3002\uff0c\uff1a\uff1b\uff09\uff1f]\*\*\w")
"""Markdown takes such stars for text: punctuation stands before them, and a letter behind."""

pages = pytest.mark.parametrize(
    "page", TRANSLATIONS, ids=[page.relative_to(ROOT).as_posix() for page in TRANSLATIONS]
)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def numbers(text: str) -> set[str]:
    return {number.rstrip(".,").replace(",", "") for number in re.findall(NUMBER, text)}


def without_targets(text: str) -> str:
    """Return the text of links without where they lead."""
    return re.sub(r"\]\([^)]*\)", "]", text)


def wrapped_lines(text: str) -> list[str]:
    """Return the lines that a paragraph's first line is continued in: a browser shows a gap between them."""
    lines = text.splitlines()
    return [
        line
        for before, line in pairwise(lines)
        if re.match(HAN, line) and before.strip() and re.search(HAN, before) and not before.startswith("#")
    ]


@pages
def test_a_chinese_page_has_the_code_and_the_headings_of_its_original(page: Path) -> None:
    assert fenced_blocks(page) == fenced_blocks(original(page)), (
        "copy them: python -m tests.support.translations"
    )
    texts = (without_blocks(file.read_text(encoding="utf-8")) for file in (page, original(page)))
    chinese, english = (re.findall(r"^(#+) ", text, re.MULTILINE) for text in texts)
    assert chinese == english and chinese


@pages
def test_a_chinese_page_has_every_row_item_picture_and_name_of_its_original(page: Path) -> None:
    chinese, english = (without_blocks(file.read_text(encoding="utf-8")) for file in (page, original(page)))
    for part in (r"^\|", r"^(?:-|\d+\.) ", r"!\["):
        assert len(re.findall(part, chinese, re.MULTILINE)) == len(re.findall(part, english, re.MULTILINE)), (
            part
        )
    assert code_spans(english) - code_spans(chinese) == set()


@pages
def test_names_and_figures_of_a_chinese_page_stand_in_its_original(page: Path) -> None:
    text, english = page.read_text(encoding="utf-8"), original(page).read_text(encoding="utf-8")
    assert sorted(name for name in code_spans(without_blocks(text)) if name not in english) == []
    assert numbers(without_targets(prose(page))) - numbers(english) == set()


@pages
def test_links_of_a_chinese_page_resolve_and_stay_in_chinese(page: Path) -> None:
    text = prose(page)
    back, *others = re.findall(r"\]\(([^)\s]+)\)", text)
    assert (page.parent / back).resolve() == original(page), "the first link leads to the original"
    for target in others:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and not translated(file).exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_a_chinese_page_is_set_as_chinese(page: Path) -> None:
    text = prose(page)
    plain = without_targets(text)
    assert re.search(HAN, plain)
    for rule in (SPACED, HALF_WIDTH, BROKEN_BOLD):
        assert [match.group() for match in rule.finditer(plain)] == [], rule.pattern
    assert wrapped_lines(page.read_text(encoding="utf-8")) == []


def test_the_two_readmes_lead_to_each_other() -> None:
    assert f"]({README_ZH.name})" in README.read_text(encoding="utf-8")
    assert f"]({README.name})" in README_ZH.read_text(encoding="utf-8")


def test_what_is_wrong_in_a_page_is_seen() -> None:
    assert SPACED.search("用GPU") and SPACED.search("8 个rank") and not SPACED.search("用 8 个 rank。")
    assert (
        HALF_WIDTH.search("损失,梯度")
        and HALF_WIDTH.search("结束.")
        and not HALF_WIDTH.search("损失、梯度。")
    )
    assert BROKEN_BOLD.search("**相同。**测试") and not BROKEN_BOLD.search("**相同**。测试")
    assert wrapped_lines("第一行\n第二行\n") == ["第二行"] and not wrapped_lines("# 题\n\n一\n\n- 二\n- 三\n")
    assert numbers("损失 1.26、1700 万、1,024 个、3.5B、第 3 步。") == {"1.26", "1024", "3"}


def test_blocks_are_copied_and_missing_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english, chinese = tmp_path / "page.md", tmp_path / "page.zh.md"
    english.write_text("One\n\n```bash\nls\n```\n\nTwo\n\n```\nout\n```\n", encoding="utf-8")
    monkeypatch.setattr("tests.support.translations.original", lambda page: english)
    chinese.write_text("一\n\n```\n```\n\n二\n\n```text\nold\n```\n", encoding="utf-8")
    copy_blocks(chinese)
    assert chinese.read_text(encoding="utf-8") == "一\n\n```bash\nls\n```\n\n二\n\n```\nout\n```\n"
    chinese.write_text("一\n\n```\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.zh\.md has 1 code blocks, page\.md 2"):
        copy_blocks(chinese)
