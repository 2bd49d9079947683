"""The pairwise table: it is complete and legal, and its rows train to the numbers of one process.

`python -m tests.parity.run_matrix` runs all of it; every change runs the part that `part_for_every_change` chooses, and
the core the part of that which `part_for_the_core` chooses.
"""

import pytest

from tests.support.matrix.axes import AXES, LATER
from tests.support.matrix.pairwise import every_pair, pairs_of, uncoverable
from tests.support.matrix.rows import illegal
from tests.support.matrix.table import (
    TABLE,
    as_text,
    made_anew,
    part_for_every_change,
    part_for_the_core,
    read_table,
)
from tests.support.matrix.train import Matrix

ROWS = read_table()
PART = frozenset(part_for_every_change(ROWS))
CORE = frozenset(part_for_the_core(ROWS, PART))
VALUES = {name: list(axis.values) for name, axis in AXES.items()}


def test_rows_are_legal_and_each_stands_once():
    assert {index: reason for index, row in enumerate(ROWS, start=1) if (reason := illegal(row))} == {}
    assert len({tuple(row.items()) for row in ROWS}) == len(ROWS)
    assert 120 <= len(ROWS) <= 240


def test_every_pair_of_values_that_can_occur_does():
    there = {pair for row in ROWS for pair in pairs_of(row)}
    absent = [pair for pair in every_pair(VALUES) if pair not in there]
    # As `cover` has it: no axis that joined later makes a pair of the others legal.
    sooner = {name: values for name, values in VALUES.items() if name not in LATER}
    plain = {name: VALUES[name][0] for name in LATER}
    among_sooner = [pair for pair in absent if dict(pair).keys() <= sooner.keys()]
    reasons = uncoverable(among_sooner, sooner, lambda row: illegal({**row, **plain}))
    reasons |= uncoverable([pair for pair in absent if pair not in among_sooner], VALUES, illegal)
    assert [sorted(pair) for pair in absent if pair not in reasons] == []


@pytest.mark.slow
def test_the_table_is_what_the_axes_and_the_rules_make():
    assert as_text(made_anew().rows) == TABLE.read_text(), "python -m tests.parity.run_matrix --write"


@pytest.fixture(scope="module")
def matrix(ranks):
    return Matrix(ranks)


def _marks(index: int) -> tuple[pytest.MarkDecorator, ...]:
    # torch.compile takes longer than the rest of a row: every change runs one such row, test_compile.py has the others.
    if ROWS[index]["compile"] == "on":
        return (pytest.mark.extended if index in CORE else pytest.mark.slow,)
    if index in CORE:
        return ()
    return (pytest.mark.extended if index in PART else pytest.mark.slow,)


def _name(index: int) -> str:
    return f"{index + 1}-{ROWS[index]['layout']}-{ROWS[index]['schedule']}"


@pytest.mark.parametrize(
    "index",
    [pytest.param(each, marks=_marks(each)) for each in range(len(ROWS))],
    ids=_name,
)
def test_a_row_equals_one_process(matrix, index):
    matrix.run(ROWS[index]).require()
