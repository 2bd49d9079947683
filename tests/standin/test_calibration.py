"""The calibration of a card, on the stand-in accelerator: each part of a step is measured there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.load import load_run
from megalite.planner.calibration import MeasuredRanks
from megalite.train.step.calibrate import CalibrationJob, MeasuredMachine, group_times, this_machine
from tests.support.ranks import RankPool
from tests.unit.planner.calibrated import PROBES

SETTINGS = {
    "model.hidden_size": 16,
    "model.intermediate_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.vocab_size": 32,
    "training.steps": 1,
    "training.micro_batch_size": 1,
    "training.micro_batches": 1,
    "training.sequence_length": 8,
    "training.precision": "bf16",
    "data.source": "stdlib",
}


def job() -> CalibrationJob:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    return CalibrationJob([load_run(None, flags).config], 32, 1, True, Path("unused"), PROBES)


def measure_on_card() -> tuple[MeasuredMachine, dict[str, Any]]:
    return this_machine(), group_times(job(), 1, torch.device("standin", 0))


@pytest.mark.extended
def test_each_part_is_measured_on_an_accelerator(devices: RankPool) -> None:
    [(machine, times)] = devices.run(measure_on_card)
    assert machine.cards and machine.device == "stand-in" and machine.groups[1] is True
    [computing] = times["computing"]
    measured = MeasuredRanks(**computing)
    assert (measured.ranks, measured.precision, len(measured.products)) == (1, "bf16", 8)
    assert all(product["forward"] > 0 for product in computing["products"])
    assert {step["zero"] for step in computing["steps"]} == {0} and times["links"] == []
