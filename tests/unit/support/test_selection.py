"""The core of a parametrized test is what it says, and what a newcomer runs is chosen by marks alone."""

import importlib.util

import pytest

from tests.support.ranks import PRELOADED
from tests.support.selection import cases


def test_all_cases_but_those_of_the_core_are_marked() -> None:
    made = cases(["a", "b", pytest.param("c", marks=pytest.mark.slow)], core=["b"])
    assert [case.values for case in made] == [("a",), ("b",), ("c",)]
    assert [[mark.name for mark in case.marks] for case in made] == [["extended"], [], ["slow"]]


def test_a_tuple_is_a_value_of_each_argument() -> None:
    made = cases([(1, "a"), (2, "b")], core=lambda case: case[0] == 2)
    assert [(case.values, bool(case.marks)) for case in made] == [((1, "a"), True), ((2, "b"), False)]


def test_a_core_without_a_case_is_refused() -> None:
    with pytest.raises(ValueError, match="no case is of the core"):
        cases(["a"], core=["b"])


def test_what_the_ranks_import_once_is_there() -> None:
    """The server of the ranks says nothing where a module is not, and each rank would import it anew."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
