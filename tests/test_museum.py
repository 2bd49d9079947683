"""docs/museum.md: every exhibit stands once, has a fault that turns its test red, and the page is written from them."""

import ast
from pathlib import Path

import pytest

from docs import museum
from docs.museum import SUBJECTS, Row, exhibits, report_links
from tests.support import museum as of_pytest
from tests.support.context_faults import CONTEXT_FAULTS
from tests.support.expert_faults import EXPERT_FAULTS
from tests.support.mutations import FAULTS, OPTIMIZER_FAULTS, PREFERENCE_FAULTS, PREFIX_FAULTS
from tests.support.planted import PLANTED, Planted, instead

ROOT = Path(__file__).parents[1]
EXHIBITS = exhibits()
LONGEST_CELL = 160


def decorators(row: Row) -> tuple[ast.FunctionDef, list[ast.Call]]:
    """Return the test of an exhibit and the decorators that make it one."""
    file, _, name = row.test.partition("[")[0].partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    [function] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    return function, [call for call in calls if ast.unparse(call.func) == "exhibit"]


def test_the_page_is_written_from_the_tests() -> None:
    assert museum.PAGE.read_text(encoding="utf-8") == museum.page(), "write it anew: python -m docs.museum"


def test_every_report_stands_once_with_a_line_of_each() -> None:
    reports = [row.report for row in EXHIBITS]
    assert len(set(reports)) == len(reports)
    for row in EXHIBITS:
        assert row.subject in SUBJECTS, row.report
        assert report_links(row.report, *row.also)
        for cell in (row.there, row.here):
            assert 0 < len(cell) <= LONGEST_CELL and "\n" not in cell, row.report
            assert not cell.startswith(("Of ", "What ")), row.report


def test_a_fault_that_is_only_named_is_planted_by_the_test() -> None:
    known = {*FAULTS, *OPTIMIZER_FAULTS, *PREFIX_FAULTS, *PREFERENCE_FAULTS, *CONTEXT_FAULTS, *EXPERT_FAULTS}
    for row in EXHIBITS:
        function, calls = decorators(row)
        for call in calls:
            [fault] = [keyword.value for keyword in call.keywords if keyword.arg == "fault"]
            if isinstance(fault, ast.Constant):
                assert fault.value in known, row.report
                assert "fault=" in ast.unparse(function), row.report
                # Where a test has several faults, the exhibit is the case of its own.
                assert f"[{fault.value}]" in row.test or fault.value in ast.unparse(function), row.report


@pytest.mark.parametrize("report", ["DeepSpeed 8224", "DeepSped#8224", "DeepSpeed#", "#1", "DeepSpeed PR 1"])
def test_a_report_of_an_unknown_form_or_repository_is_refused(report: str) -> None:
    with pytest.raises(ValueError, match=r"NAME#NUMBER"):
        report_links(report)


def test_a_fault_is_planted_for_as_long_as_it_is_tried() -> None:
    fault = Planted("docs.museum:SUBJECTS", instead({}))
    with fault.planted():
        assert museum.SUBJECTS == {} and [fault] == PLANTED
    assert museum.SUBJECTS and not PLANTED


SHOWN = """
import pytest

from docs import museum
from tests.support.museum import exhibit
from tests.support.planted import Planted, instead

GONE = Planted("docs.museum:SUBJECTS", instead({}))
SAID = {"subject": "data", "there": "lost", "here": "kept"}

@exhibit("trl#1", **SAID, fault=GONE)
def test_red(): assert museum.SUBJECTS

@pytest.mark.parametrize("number", [0, 1])
@exhibit("trl#2", **SAID, fault=GONE, case="1")
def test_one_case(number): assert museum.SUBJECTS or not number

@exhibit("trl#3", **SAID, fault=GONE)
def test_green(): assert museum.PAGE

@exhibit("trl#4", **SAID, fault=GONE)
def test_crash(): museum.SUBJECTS["data"]

@exhibit("trl#5", **SAID, fault=Planted("docs.museum:SUBJECTS", instead({}), seen_as=(KeyError,)))
def test_crash_that_is_the_fault(): museum.SUBJECTS["data"]

@exhibit("trl#6", **SAID, fault=GONE)
def test_skipped():
    if not museum.SUBJECTS:
        pytest.skip("no subjects")
"""


class Outcomes:
    """A plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.by_name[report.nodeid.partition("::")[2]] = report.outcome


def test_an_exhibit_that_its_fault_does_not_turn_red_fails(tmp_path: Path) -> None:
    (tmp_path / "test_shown.py").write_text(SHOWN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    exhibit: of the museum\n")
    quiet = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "-p",
        "no:hypothesispytest",
    ]
    outcomes = Outcomes()
    code = pytest.main([str(tmp_path), "-m", "exhibit", *quiet], plugins=[outcomes, of_pytest])
    assert code == pytest.ExitCode.TESTS_FAILED
    plain = {name: outcome for name, outcome in outcomes.by_name.items() if " with " not in name}
    assert len(plain) == 7 and set(plain.values()) == {"passed"}
    assert {name: outcome for name, outcome in outcomes.by_name.items() if " with " in name} == {
        "test_red with trl#1": "passed",
        "test_one_case with trl#2[1]": "passed",
        "test_green with trl#3": "failed",
        "test_crash with trl#4": "failed",
        "test_crash_that_is_the_fault with trl#5": "passed",
        "test_skipped with trl#6": "skipped",
    }
