"""The page of what five guides of this field name, from docs/guides.toml.

python -m docs.guides        # writes docs/guides.md
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "guides.md"
TABLE = Path(__file__).parent / "guides.toml"
GUIDES = {
    "G": ("a framework's guide to training language models, in two languages", 47),
    "T": ("the guide of a trainer library", 56),
    "N": ("a module of a course", 39),
    "F": ("a guide to pre-training and fine-tuning", 27),
}
"""Letter -> (the guide, the number of its items)."""
PREAMBLE = """# Coming from a guide

Written by `python -m docs.guides` from `docs/guides.toml`; a test keeps it so.

Five guides of this field were read line by line. They name {number} things that a user wants to do. The tables say by
which setting or command megalite does each of them, where it is explained, and which test shows it:

```bash
python -m pytest {example}
```

{guides}

A test checks that each setting takes the value that stands here, that each command has its flags, and that each test
exists. The link of a test leads to its file.

*card*: only a GPU can show all of it. The tests named run its branches on CPUs or on a stand-in for an accelerator;
[on a GPU](gpu.md) says what cards have shown.

[Seven traps](learn/traps.md) of these guides run as programs: labels that are shifted twice (G14), a last group of
micro batches that is never applied (G23), a batch for four ranks (T41), layers that a division leaves over (N14),
recomputation with new layers in place of trained ones (N16), adapters that do not begin at the base (N21), means of
batch means (F10).
"""


@dataclass(frozen=True)
class Row:
    """An item of a guide. id: letter and number. page: below docs/. card: whether a card alone can show all of it."""

    id: str
    item: str
    here: str
    page: str
    tests: tuple[str, ...]
    card: bool = False


def topics(text: str | None = None) -> dict[str, list[Row]]:
    """Return topic -> its rows, of docs/guides.toml or of a text in its form."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8") if text is None else text)
    return {
        topic["title"]: [Row(**{**row, "tests": tuple(row["tests"])}) for row in topic["rows"]]
        for topic in table["topics"]
    }


def page() -> str:
    """Return the page, in Markdown."""
    by_topic = topics()
    rows = [row for topic in by_topic.values() for row in topic]
    guides = [f"- **{letter}**: {guide}, {number} items" for letter, (guide, number) in GUIDES.items()]
    example = next(row for row in rows if row.id == "G14").tests[0]
    lines = [PREAMBLE.format(number=len(rows), guides="\n".join(guides), example=example)]
    for title, topic in by_topic.items():
        lines += [f"## {title}", "", "| | the guide has | here | shown by |", "|---|---|---|---|"]
        lines += [_line(row) for row in topic]
        lines.append("")
    lines += ["## By guide", "", "| guide | topic | items |", "|---|---|---|"]
    lines += _by_guide(by_topic)
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    name = row.page.partition("#")[0].removesuffix(".md").replace("-", " ")
    parts = [test.partition("::") for test in row.tests]
    tests = "<br>".join(f"[`{test}`](../{file})" for file, _, test in parts)
    shown = f"*card*; {tests}" if row.card else tests
    return f"| {row.id} | {row.item} | {row.here} ([{name}]({row.page})) | {shown} |"


def _by_guide(by_topic: dict[str, list[Row]]) -> Iterator[str]:
    for letter in GUIDES:
        for title, rows in by_topic.items():
            numbers = sorted(int(row.id[1:]) for row in rows if row.id[0] == letter)
            anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            if numbers:
                yield f"| {letter} | [{title}](#{anchor}) | {', '.join(map(str, numbers))} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
