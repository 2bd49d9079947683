"""The prediction at the start of a run, and the lines at its end that compare it with what was measured."""

from dataclasses import replace
from pathlib import Path
from socket import gethostname

import pytest

from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import DEFAULT_FILE, write_calibration
from megalite.planner.cluster import Cluster
from megalite.planner.memory import largest_rank
from megalite.planner.prediction import calibration_here, predict_run
from megalite.planner.step_time import step_time
from megalite.topology.axes import Layout
from tests.support.parity import about
from tests.unit.planner.calibrated import calibration
from tests.unit.planner.plans import plan

CARD = "H100 80GB HBM3"


def test_a_known_card_has_the_time_of_the_planner() -> None:
    run = plan(layout=Layout(data=4))
    prediction = predict_run(run, f"NVIDIA {CARD}", nodes=2, cards_per_node=2)
    cluster = Cluster(CARD, 2, 2)
    assert prediction.seconds == step_time(run, cluster, largest_rank(run)).total
    assert prediction.memory == largest_rank(run).peak
    speed = 4 * 4 * 2 * 32 / prediction.seconds
    assert prediction.line.startswith(
        f"predicted: {prediction.seconds:.3g} s a step, {speed:,.0f} tokens/s (assumed: "
    )
    assert CARD in prediction.line


def test_without_a_known_card_only_memory_is_predicted() -> None:
    for card in (None, "NVIDIA H20", "cpu"):
        prediction = predict_run(plan(), card, 1, 1)
        assert prediction.seconds is None and prediction.line == "" and prediction.memory > 0
    # It has no tensor cores for bf16.
    assert predict_run(plan(), "Tesla T4", 1, 1).line == ""


def test_the_calibration_of_this_machine_is_found_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibration_here("cpu", "fp32", "2.13.0") is None
    here = replace(calibration(), machine=gethostname())
    write_calibration(here, tmp_path / DEFAULT_FILE)
    for other in (("H200", "fp32", "2.13.0"), ("cpu", "bf16", "2.13.0"), ("cpu", "fp32", "2.12.0")):
        assert calibration_here(*other) is None
    found = calibration_here("cpu", "fp32", "2.13.0")
    assert found is not None
    run = plan(layout=Layout(data=2), precision="fp32", on_cpu=True)
    prediction = predict_run(run, None, 1, 2, found)
    assert prediction.seconds == step_time(run, CalibratedMachine(here, 2), largest_rank(run)).total
    assert prediction.line.endswith(f"(measured on {gethostname()} with torch 2.13.0)")
    assert predict_run(run, None, 2, 1, found).line == ""  # it knows no network
    write_calibration(calibration(), tmp_path / DEFAULT_FILE)
    assert calibration_here("cpu", "fp32", "2.13.0") is None


def test_the_error_has_its_sign_and_is_of_what_was_measured() -> None:
    prediction = replace(predict_run(plan(), None, 1, 1), memory=3 * 2.0**30, seconds=0.5)
    assert prediction.compared(4 * 2.0**30, 0.4) == (
        "predicted: memory of the largest rank 3.0 GiB, measured 4.0 GiB (25.0% too low); step 0.5 s, measured 0.4 s "
        "(25.0% too high)"
    )
    assert prediction.compared(None, 0.4).startswith("predicted: step 0.5 s")
    assert prediction.compared(0, None) == "" and replace(prediction, seconds=None).compared(None, 0.4) == ""
    assert "keeps freed memory too" in replace(prediction, on_cpu=True).compared(4 * 2.0**30, None)


def test_a_small_run_on_a_cpu_is_not_compared_with_the_process_around_it() -> None:
    small = replace(predict_run(plan(), None, 1, 1), memory=2.0**20, on_cpu=True)
    assert small.compared(60 * 2.0**20, None) == ""
    assert "too low" in replace(small, on_cpu=False).compared(60 * 2.0**20, None)
    assert replace(small, memory=2.0**29).compared(2.0**29, None).endswith("measured 0.5 GiB (0.0% too low)")


def test_the_tokens_are_those_of_all_replicas() -> None:
    assert predict_run(plan(layout=Layout(data=4)), None, 1, 4).tokens == about(4 * 2 * 32 * 4)
