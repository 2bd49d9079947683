"""Experts that are spread over ranks compute what one process does, whichever ranks and experts have rows."""

from dataclasses import replace

import pytest
import torch

from megalite.parallel.mesh import ALONE
from tests.support.mixtures import (
    EXPERT_FAULTS,
    NAMES,
    ExpertCase,
    alone,
    experts_on_rank,
    faulty_on_rank,
    of_rank,
    order_on_rank,
)
from tests.support.parity import LAYOUT_RTOL, OPERATOR_RTOL, assert_close, relative_error

TOKENS = (9, 5, 12)
CASES = {
    "two of seven": ExpertCase(TOKENS),
    "shared": ExpertCase(TOKENS, shared=True),
    "recomputed": ExpertCase(TOKENS, shared=True, recomputed=True),
    "one of seven": ExpertCase(TOKENS, chosen=1),
    "all": ExpertCase(TOKENS, chosen=7),
    "all tokens to one expert": ExpertCase(TOKENS, chosen=1, favourites=(4,)),
    "a rank without rows": ExpertCase(TOKENS, favourites=(0, 1)),
    "experts without rows": ExpertCase(TOKENS, avoided=(1, 3, 6), shared=True),
    "a rank without tokens": ExpertCase((7, 0, 4), shared=True),
    "an expert a rank": ExpertCase(TOKENS, number=3),
}


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_what_one_process_computes(ranks, size: int) -> None:
    cases = {name: replace(case, tokens=case.tokens[:size]) for name, case in CASES.items()}
    results = ranks.run(experts_on_rank, world_size=size, cases=[*cases.values()])
    for (name, case), of_ranks in zip(cases.items(), zip(*results, strict=True), strict=True):
        whole = [torch.cat(shards) for shards in zip(*of_ranks, strict=True)]
        for what, ours, expected in zip(NAMES, whole, alone(case), strict=True):
            assert_close(ours, expected, rtol=OPERATOR_RTOL, what=f"{name}: {what}")


@pytest.mark.parametrize("name", CASES)
def test_one_rank_exchanges_nothing(name: str) -> None:
    case = replace(CASES[name], tokens=(9,))
    for what, ours, expected in zip(NAMES, of_rank(case, ALONE), alone(case), strict=True):
        assert_close(ours, expected, rtol=OPERATOR_RTOL, what=f"{name}: {what}")


def test_the_work_beside_runs_while_rows_are_under_way(ranks) -> None:
    forward = ["start", "beside", "end", "start", "end"]
    backward = ["start", "end", "start", "beside, backward", "end"]
    events = ranks.run(order_on_rank, world_size=2, case=ExpertCase(TOKENS[:2]))
    assert events == [[*forward, "backward", *backward]] * 2


def test_planted_faults_are_seen(ranks) -> None:
    case = ExpertCase(TOKENS[:2])
    results = ranks.run(faulty_on_rank, world_size=2, case=case)
    expected = alone(case)
    for name, of_ranks in zip(EXPERT_FAULTS, zip(*results, strict=True), strict=True):
        whole = [torch.cat(shards) for shards in zip(*of_ranks, strict=True)]
        errors = [relative_error(*pair) for pair in zip(whole, expected, strict=True)]
        assert max(errors) > 1e6 * LAYOUT_RTOL, f"{name}: {errors}"
