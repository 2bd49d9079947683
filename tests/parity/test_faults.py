"""Planted faults: the comparison that guards against a mistake fails when the mistake is made."""

from functools import cache

import pytest

from tests.support.matrix.axes import AXES
from tests.support.matrix.rows import illegal
from tests.support.matrix.train import Matrix
from tests.support.mutations import FAULTS
from tests.support.ranks import RankFailed, RanksHung
from tests.support.selection import cases

PLAIN = {name: next(iter(axis.values)) for name, axis in AXES.items()}


@pytest.fixture(scope="module")
def matrix(ranks):
    return Matrix(ranks)


@pytest.fixture(scope="module")
def require_equal_without_fault(matrix):
    """Several faults are shown by the same run, which is made once."""

    @cache
    def require(shown_by: tuple[tuple[str, str], ...]) -> None:
        matrix.run({**PLAIN, **dict(shown_by)}).require()

    return require


def test_there_are_many_and_each_is_shown_by_a_legal_run():
    assert len(FAULTS) >= 15
    reasons = {name: illegal({**PLAIN, **fault.shown_by}) for name, fault in FAULTS.items()}
    assert {name: reason for name, reason in reasons.items() if reason} == {}


# Every second one in the core: each kind of mistake (gradients, norms, dropout, loss, ZeRO) stands several times.
@pytest.mark.parametrize("name", cases(FAULTS, core=list(FAULTS)[::2]))
def test_a_planted_fault_departs_from_one_process(matrix, require_equal_without_fault, name):
    row = {**PLAIN, **FAULTS[name].shown_by}
    require_equal_without_fault(tuple(sorted(FAULTS[name].shown_by.items())))
    with pytest.raises(AssertionError) as departed:
        matrix.run(row, fault=name).require()
    # A crash or a deadlock would be noticed by anybody: what is guarded against is a run that goes on.
    assert not isinstance(departed.value, RankFailed | RanksHung), departed.value
