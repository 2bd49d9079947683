"""docs/guides.toml: every item of the guides has what megalite has for it, and tests that exist."""

import ast
import contextlib
import io
import re
import tomllib
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from docs import guides
from docs.guides import GUIDES, Row, topics
from megalite.cli import main
from megalite.cli.commands import COMMANDS
from megalite.config.sections.describe import section_models

ROOT = Path(__file__).parents[1]
ROWS = list(chain.from_iterable(topics().values()))
SECTIONS = section_models()
_SETTING = re.compile(rf"({'|'.join(SECTIONS)})\.(\w+)(?: = (.+))?")
_COMMAND = re.compile(r"(?:.* -m )?megalite (.*)")


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """Return the names of the tests of a file; of a method, with its class; none where there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


@cache
def help_of(*words: str) -> str:
    """Return the help of a command with all of its options; "" where there is no such command."""
    shown = io.StringIO()
    for rest in (["--help", "all"], ["--help"]):
        said = contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO())
        with said[0], said[1], contextlib.suppress(SystemExit):
            main([*words, *rest])
    return shown.getvalue()


class RowCheck:
    """The problems of a row's words in backquotes and of its tests."""

    def __init__(self, row: Row):
        self._defaults = "the default" in row.here
        pages = [row.page, *re.findall(r"\]\(([^)]+)\)", row.here)]
        files = [ROOT / "docs" / page.partition("#")[0] for page in pages]
        self._text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        # The setting and the command that a bare value and bare flags belong to.
        self._setting = self._command = ""
        self.problems = [] if row.item and row.here and row.tests else ["has an empty part"]
        self.problems += [
            problem for code in re.findall(r"`([^`]+)`", row.here) if (problem := self._word(code))
        ]
        self.problems += [f"there is no page {file.name}" for file in files if not file.is_file()]
        for test in row.tests:
            file, _, name = test.partition("::")
            if not file.startswith("tests/") or name not in names_of_tests(file):
                self.problems.append(f"there is no test {test}")

    def _word(self, code: str) -> str:
        if section := re.fullmatch(r"\[\[?(\w+)[\w.]*\]\]?", code):
            return "" if section[1] in SECTIONS else f"there is no section {code}"
        if code != "run.toml" and (setting := _SETTING.fullmatch(code)):
            self._setting = f"{setting[1]}.{setting[2]}"
            return self._value(setting[3])
        if self._setting and re.fullmatch(r'".*"', code):
            return self._value(code)
        if command := _COMMAND.fullmatch(code):
            self._command = command[1]
            return self._flags(command[1])
        if code.startswith("--"):
            return self._flags(f"{self._command} {code}")
        return "" if code in self._text or (ROOT / code).is_file() else f"the page does not have {code}"

    def _value(self, text: str | None) -> str:
        section, key = self._setting.split(".")
        info = SECTIONS[section].model_fields.get(key)
        if info is None:
            return f"there is no setting {self._setting}"
        if text is not None:
            value = tomllib.loads(f"value = {text}")["value"]
            accepted = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation  # type: ignore[name-defined]
            try:
                TypeAdapter(accepted).validate_python(tuple(value) if isinstance(value, list) else value)
            except ValidationError:
                return f"{self._setting} does not take {text}"
            if self._defaults and value != info.default:
                return f"{self._setting} is {info.default} by default"
        return ""

    def _flags(self, line: str) -> str:
        words = line.split()
        first = [word for word in words if not word.startswith("--")][:2]
        # A word behind the command is a subcommand only if it is in small letters and no file.
        names = first[:1] + [word for word in first[1:] if re.fullmatch(r"[a-z-]+", word)]
        if not names or names[0] not in COMMANDS:
            return f"there is no command megalite {line}"
        if len(names) == 2 and not re.search(rf"\b{names[1]}\b", help_of(names[0])):
            names.pop()
        for flag in (word for word in words if word.startswith("--")):
            key = flag.removeprefix("--")
            if "." in key:
                section, name = key.split(".")
                known = section in SECTIONS and name in SECTIONS[section].model_fields
            else:
                known = re.search(rf"{flag}\b", help_of(*names)) is not None
            if not known:
                return f"megalite {' '.join(names)} has no {flag}"
        return ""


def test_every_item_of_the_guides_stands_once() -> None:
    expected = [f"{letter}{number + 1}" for letter, (_, items) in GUIDES.items() for number in range(items)]
    assert len(expected) == 169
    assert sorted(row.id for row in ROWS) == sorted(expected)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_settings_commands_and_tests_of_a_row_exist(row: Row) -> None:
    assert RowCheck(row).problems == []


def test_the_page_is_that_of_the_table() -> None:
    assert guides.PAGE.read_text(encoding="utf-8") == guides.page(), "write it anew: python -m docs.guides"


RIGHT = next(row for row in ROWS if row.id == "G24")


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("here", "", "has an empty part"),
        ("tests", (), "has an empty part"),
        ("page", "configurations.md#training", "there is no page configurations.md"),
        (
            "tests",
            (f"{RIGHT.tests[0]}_renamed",),
            "there is no test tests/unit/train/optimizer/test_loss_scale.py::",
        ),
        ("tests", ("tests/unit/absent.py::test_x",), "there is no test tests/unit/absent.py::test_x"),
        ("here", "`training.los_scale = 2.0`", "there is no setting training.los_scale"),
        ("here", '`training.loss_scale = "static"`', "training.loss_scale does not take"),
        ("here", '`training.precision = "bf16"` or `"bf8"`', 'training.precision does not take "bf8"'),
        (
            "here",
            "`training.loss_scale_window = 500`, the default",
            "training.loss_scale_window is 1000 by default",
        ),
        ("here", "the section `[trainer]`", "there is no section [trainer]"),
        ("here", "`megalite trian`", "there is no command megalite trian"),
        ("here", "`megalite plan --fits`", "megalite plan has no --fits"),
        ("here", "`megalite train --training.step 3`", "megalite train has no --training.step"),
        ("here", "`megalite convert export`, `--quantize`", "megalite convert export has no --quantize"),
        ("here", "recorded as `loss_scaling`", "the page does not have loss_scaling"),
    ],
)
def test_what_is_not_there_is_seen(part: str, value: str | tuple[str, ...], problem: str) -> None:
    found = RowCheck(replace(RIGHT, **{part: value})).problems  # type: ignore[arg-type]
    assert len(found) == 1 and found[0].startswith(problem)


def test_the_requirements_of_a_page_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    pages = {
        name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("getting-started.md", "gpu.md")
    }
    assert f"Python {python} or newer" in pages["getting-started.md"]
    chips = re.search(r"auto \(default\): ([\d.]+) with PTX", (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert chips is not None and f"compute capability {chips[1]}" in pages["gpu.md"]
