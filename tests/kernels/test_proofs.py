"""Every CUDA source has a proof without a card and one on a card, and the table of docs/kernels.md names them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu.operators import OPERATORS
from megalite.selftest.attention import SHAPES

ROOT = Path(__file__).parents[2]
WAITING = {"expert_rows.cu"}
"""Sources that are newer than the last report of a card. Their operators prove themselves before a run uses them."""
SOURCES = sorted(path.name for path in (ROOT / "megalite" / "csrc" / "cuda").glob("*.cu"))


def table() -> dict[str, tuple[list[str], list[str]]]:
    """Source -> the tests that run it without a card, and the checks that passed on one."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.cu)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return {name: (re.findall(r"`(\w+\.py)`", tests), checks.split("; ")) for name, tests, checks in rows}


def checked() -> dict[str, bool]:
    """Operator -> whether all of its checks were right in the last report of a card."""
    [*_, path] = sorted((ROOT / "benchmarks" / "results").glob("*-gpu-suite-*.json"))
    rows = json.loads(path.read_text())["checks"]
    return {name: all(row["right"] for row in rows if row["operator"] == name) for name in _names(rows)}


def _names(rows: list[dict[str, object]]) -> set[str]:
    return {str(row["operator"]) for row in rows}


@pytest.mark.parametrize("source", SOURCES)
def test_a_cuda_source_is_proved_without_a_card_and_on_one(source: str) -> None:
    tests, checks = table()[source]
    stem = re.sub(r"_\d+(_dropout)?$", "", source.removesuffix(".cu"))
    assert tests
    for test in tests:
        text = (ROOT / "tests" / "kernels" / test).read_text()
        assert re.search(stem.split("_")[0].rstrip("s"), text, re.IGNORECASE), f"{test} does not name {stem}"
    if source in WAITING:
        assert checks[0].startswith("not yet")
        return
    right = checked()
    assert checks and all(right[name] for name in checks)
    if size := re.search(r"attention_\w+?_(\d+)", source):
        assert any(shape[3] == int(size.group(1)) for shape in SHAPES)
        assert set(checks) <= {operator.name for operator in OPERATORS if operator.shapes == SHAPES}


def test_the_table_has_no_row_of_a_source_that_is_gone() -> None:
    assert sorted(table()) == SOURCES
