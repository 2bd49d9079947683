"""The chat page: Markdown becomes elements and never HTML, a cut answer says so, a system prompt is sent."""

import json
import re
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

from tests.support.waiting import PATIENCE

PAGE = resources.files("megalite.serve").joinpath("chat_page.html").read_text("utf-8")
SCRIPT = PAGE[PAGE.index("<script>") + len("<script>") : PAGE.index("</script>")]
RENDERER = SCRIPT[SCRIPT.index("const FENCE") : SCRIPT.index("class Refused")]
TAGS = {"p", "pre", "code", "hr", "blockquote", "ul", "ol", "li", "strong", "em", "del", "a"}


def link(address: str, *children: Any) -> list[Any]:
    return ["a", {"href": address, "target": "_blank", "rel": "noopener noreferrer nofollow"}, [*children]]


def node(tag: str, *children: Any, **attributes: str) -> list[Any]:
    return [tag, attributes, [*children]]


RENDERED: list[tuple[str, list[Any]]] = [
    (
        "# Title #\none **two** *three*\nfour",
        [
            node("h1", "Title"),
            node("p", "one ", node("strong", "two"), " ", node("em", "three"), "\nfour"),
        ],
    ),
    ("***both***", [node("p", node("strong", node("em", "both")))]),
    ("2 * 3 * 4, snake_case_name, \\*no\\*", [node("p", "2 * 3 * 4, snake_case_name, *no*")]),
    ("2 * 3 and *x*", [node("p", "2 * 3 and ", node("em", "x"))]),
    ("`a < *b*` ``c`d``", [node("p", node("code", "a < *b*"), " ", node("code", "c`d"))]),
    (
        "```python\nif x < 1:\n    *y*\n```\nend",
        [node("pre", node("code", "if x < 1:\n    *y*")), node("p", "end")],
    ),
    ("~~~\nnot ended", [node("pre", node("code", "not ended"))]),
    (
        "- a\n- b\n  1. c\n  2. d\n\n3. e",
        [
            node("ul", node("li", "a"), node("li", "b", node("ol", node("li", "c"), node("li", "d")))),
            node("ol", node("li", "e"), start="3"),
        ],
    ),
    ("> a\n> b\n\n---", [node("blockquote", node("p", "a\nb")), node("hr")]),
    (
        "[a](https://b.c/d_(e)) <https://f.g> https://h.i/j.",
        [
            node(
                "p",
                link("https://b.c/d_(e)", "a"),
                " ",
                link("https://f.g", "https://f.g"),
                " ",
                link("https://h.i/j", "https://h.i/j"),
                ".",
            )
        ],
    ),
    ("![plot](https://a.b/c.png)", [node("p", link("https://a.b/c.png", "plot"))]),
]
UNSAFE = [
    "[a](javascript:alert(1))",
    "[a]( JaVaScRiPt:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](java\nscript:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "![a](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "**<script>alert(1)</script>**",
    "`</code><script>alert(1)</script>`",
    '[a](https://b.c" onmouseover="alert(1))',
]


def rendered(texts: list[str]) -> list[list[Any]]:
    program = (
        f"{RENDERER}\nconst texts = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify(texts.map(text => blocks(text.split('\\n')))));"
    )
    done = subprocess.run(
        ["node", "-e", program],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    trees: list[list[Any]] = json.loads(done.stdout)
    return trees


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_markdown_is_a_tree_of_known_tags_and_addresses() -> None:
    trees = rendered([text for text, _ in RENDERED] + UNSAFE)
    for (text, expected), tree in zip(RENDERED, trees, strict=False):
        assert tree == expected, text
    for text, tree in zip(UNSAFE, trees[len(RENDERED) :], strict=True):
        nodes = list(tree)
        while nodes:
            part = nodes.pop()
            if isinstance(part, str):
                continue
            tag, attributes, children = part
            assert tag in TAGS or re.fullmatch("h[1-6]", tag), text
            assert re.match("https?://|mailto:", attributes.get("href", "https://")), text
            assert attributes.keys() <= {"href", "target", "rel", "start"}, text
            nodes += children


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_long_answers_of_open_marks_are_read_in_time() -> None:
    texts = ["*a " * 5000, "`a``b" * 3000, ">" * 5000, "- " * 5000, "[a](" * 3000, "_a " * 5000]
    assert len(rendered(texts)) == len(texts)


def test_the_page_never_reads_html_and_loads_nothing_from_elsewhere() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval("):
        assert way not in PAGE, way
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", PAGE) == ["data:,"]


def test_a_cut_answer_says_so_and_a_system_prompt_is_sent_before_the_conversation() -> None:
    assert '=== "length"' in SCRIPT and "Cut at max tokens" in SCRIPT
    assert 'id="system"' in PAGE and '{ role: "system", content: system }' in SCRIPT
