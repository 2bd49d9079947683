"""Fixtures for the tests of parity."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.ranks import RankPool
from tests.support.training import Job, RankResult, train_on_rank


@pytest.fixture(scope="session")
def reference(ranks: RankPool) -> Callable[[Job], RankResult]:
    """A job as it is, in one process: computed once for each job."""

    @cache
    def run(job: Job) -> RankResult:
        [result] = ranks.run(train_on_rank, world_size=1, job=job)
        return result

    return run
