"""The kept measurements of benchmarks/memory_prediction.py beside the predictions of today's model."""

import json
from functools import cache
from statistics import median
from typing import Any

from benchmarks.memory_configurations import predicted_peak, resolved
from benchmarks.memory_prediction import SEED, every_configuration
from benchmarks.report import RESULTS
from megalite.topology.context import CONTEXT_METHODS
from megalite.topology.optimizers import OPTIMIZERS

FEWEST, MEDIAN, WORST = 58, 0.05, 0.10


@cache
def rows() -> list[dict[str, Any]]:
    *_, newest = sorted(RESULTS.glob("*-memory-prediction-cpu.json"))
    kept = json.loads(newest.read_text())
    assert kept["seed"] == SEED
    measured: list[dict[str, Any]] = kept["rows"]
    return measured


def test_the_configurations_are_those_of_the_seed_and_have_every_axis() -> None:
    drawn = every_configuration(SEED)
    assert len({row["case"] for row in rows()}) == len(rows()) >= FEWEST
    assert [row["settings"] for row in rows()] == [drawn[row["case"]] for row in rows()]
    values = {(name, value) for row in rows() for name, value in row["settings"].items()}
    stages = {value for name, value in values if name.endswith("zero_optimization.stage")}
    assert stages == {1, 2, 3}
    assert {value for name, value in values if name == "optimizer.name"} == set(OPTIMIZERS)
    assert {value for name, value in values if name == "parallel.context_method"} == set(CONTEXT_METHODS)
    for name in ("parallel.sequence", "adapter.dora", "training.recompute_layers", "model.mlp_dropout"):
        assert any(each == name for each, _ in values)


def test_todays_predictions_are_those_kept_and_within_the_bars() -> None:
    errors = []
    for row in rows():
        expected, kinds = predicted_peak(resolved(row["settings"]))
        assert row["predicted"] == round(expected), "run python -m benchmarks.memory_prediction --again FILE"
        assert row["kinds"] == {kind: round(size) for kind, size in kinds.items()}
        errors.append(abs(expected / row["measured"] - 1))
    assert median(errors) <= MEDIAN
    assert max(errors) <= WORST
