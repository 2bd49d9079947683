"""The Chinese pages, each beside the English page that it translates.

python -m tests.support.translations        # copies the code blocks of the English pages into the Chinese ones
"""

import re
from pathlib import Path

from tests.support.documents import README
from tests.support.jobs import ROOT

README_ZH = ROOT / "README.zh.md"
FOLDER = ROOT / "docs" / "zh"
TRANSLATIONS = [README_ZH, *sorted(FOLDER.rglob("*.md"))]
_FENCED = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def original(page: Path) -> Path:
    """Return the English page of a Chinese one."""
    return README if page == README_ZH else ROOT / "docs" / page.relative_to(FOLDER)


def translated(page: Path) -> Path:
    """Return the Chinese page of an English one, which need not exist."""
    if page == README:
        return README_ZH
    docs = ROOT / "docs"
    return FOLDER / page.relative_to(docs) if page.is_relative_to(docs) else page.with_suffix(".zh.md")


def fenced_blocks(page: Path) -> list[str]:
    """Return the code blocks with their fences and languages."""
    return _FENCED.findall(page.read_text(encoding="utf-8"))


def copy_blocks(page: Path) -> None:
    """Write the English page's blocks into a Chinese page. Raises ValueError if it has more or fewer of them."""
    text, blocks = page.read_text(encoding="utf-8"), fenced_blocks(original(page))
    own = len(_FENCED.findall(text))
    if own != len(blocks):
        raise ValueError(f"{page.name} has {own} code blocks, {original(page).name} {len(blocks)}")
    in_order = iter(blocks)
    page.write_text(_FENCED.sub(lambda _: next(in_order), text), encoding="utf-8")


if __name__ == "__main__":
    for each in TRANSLATIONS:
        copy_blocks(each)
