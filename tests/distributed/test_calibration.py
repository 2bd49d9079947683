"""The groups of ranks that a calibration measures, on machines of any number of cores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.planner.calibration import MeasuredLinks
from megalite.train.step import calibrate
from megalite.train.step.calibrate import CalibrationJob, group_times, this_machine
from tests.standin.test_calibration import job
from tests.support.ranks import RankPool
from tests.unit.planner.calibrated import PROBES


def measured_links() -> dict[str, Any]:
    """Measure the links of a pair with models of one head, which the pair cannot share as they are."""
    one_head = [replace(model, heads=1) for model in PROBES.models]
    measured: CalibrationJob = replace(
        job(), computes=False, answer=Path("unused"), probes=replace(PROBES, models=one_head, rounds=2)
    )
    return group_times(measured, 2, torch.device("cpu"))


def test_a_group_of_more_ranks_than_heads_shares_the_models(ranks: RankPool) -> None:
    for times in ranks.run(measured_links, world_size=2):
        [content] = times["links"]
        links = MeasuredLinks(**content)
        assert (links.ranks, links.group, times["computing"]) == (2, 2, [])
        assert [len(models) for models in links.models.values()] == [4]


@pytest.mark.parametrize("cores", range(1, 20))
def test_each_group_of_ranks_divides_into_pairs(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "available_cores", lambda: cores)
    groups = this_machine().groups
    assert groups[1] and all(ranks.bit_count() == 1 for ranks in groups)
    assert cores // 2 < max(ranks for ranks, computes in groups.items() if computes) or cores > 8
