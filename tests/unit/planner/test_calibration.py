"""Calibrations: the file and its errors, and what a step takes on an imagined machine whose rates are known."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import ConfigError
from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import read_calibration, write_calibration
from megalite.planner.machine_rates import LayerWork, Passes
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.planner.shared_cores import makespan
from megalite.planner.stage_parameters import stage_counts
from megalite.planner.step_time import StepTime, step_time
from megalite.topology.axes import Layout
from megalite.topology.schedule_timeline import ideal_timeline, orders_of
from megalite.topology.schedules import SCHEDULES, Action
from tests.unit.planner import calibrated
from tests.unit.planner.plans import plan


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write_calibration(calibrated.calibration(), tmp_path / "here.json")
    assert asdict(read_calibration(tmp_path / "here.json")) == asdict(calibrated.calibration())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-9], "is not JSON"),
        (
            lambda text: json.dumps(json.loads(text) | {"version": 7}),
            "has version 7, and this megalite reads version 1",
        ),
        (
            lambda text: json.dumps(json.loads(text) | {"computing": [{}]}),
            "is no calibration: computing.0.ranks",
        ),
        (lambda text: "[]", "has version None"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_broken_file_is_one_error_with_a_remedy(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "here.json"
    if change is not None:
        write_calibration(calibrated.calibration(), file)
        file.write_text(change(file.read_text()))
    with pytest.raises(ConfigError) as error:
        read_calibration(file)
    assert message in str(error.value) and f"--calibrate --calibration {file}" in str(error.value)


def predicted(run: PlannedRun) -> StepTime:
    return step_time(run, CalibratedMachine(calibrated.calibration(), 2), largest_rank(run))


def micro_batch(run: PlannedRun) -> Passes:
    work = LayerWork(run.micro_batch_size, run.sequence_length, run.layout.tensor, run.positions, 4)
    return calibrated.passes(run.shape, work)


def values(run: PlannedRun) -> int:
    return stage_counts(run, 0).trained


FP32 = {"precision": "fp32", "on_cpu": True}


def test_one_rank_takes_the_time_of_its_parts() -> None:
    run = plan(**FP32)
    compute = run.micro_batches * (micro_batch(run).forward + micro_batch(run).backward)
    time = predicted(run)
    assert time.compute == pytest.approx(compute, rel=1e-6)
    assert time.update == pytest.approx(calibrated.VALUE * values(run), rel=1e-6)
    assert time.fixed == pytest.approx(calibrated.STEP, rel=1e-6)
    assert time.total == pytest.approx(compute + time.update + time.fixed)


def test_full_recomputation_repeats_the_forward_of_the_layers() -> None:
    run, again = plan(**FP32), plan(recompute="full", **FP32)
    layers = replace(run.shape, num_hidden_layers=16)
    both = micro_batch(replace(run, shape=layers)).forward - micro_batch(run).forward  # of eight layers more
    repeated = run.micro_batches * both
    assert predicted(again).compute - predicted(run).compute == pytest.approx(repeated, rel=1e-6)


def test_more_ranks_than_cores_take_turns() -> None:
    two, four = (plan(layout=Layout(data=ranks), **FP32) for ranks in (2, 4))
    assert predicted(four).compute == pytest.approx(2 * predicted(two).compute)
    gradients = 4 * values(two)
    assert predicted(two).data == pytest.approx(
        calibrated.LATENCY + calibrated.LINK_BYTE * gradients, rel=0.02
    )


def test_tensor_parallel_ranks_wait_for_their_sums() -> None:
    run = plan(layout=Layout(tensor=2), **FP32)
    hidden = 4 * run.tokens * run.shape.hidden_size
    one = calibrated.LATENCY + calibrated.LINK_BYTE * hidden
    sums = run.micro_batches * run.shape.num_hidden_layers * 4 * one
    assert sums < predicted(run).tensor < 1.4 * sums


def test_zero_takes_what_its_steps_took() -> None:
    run = plan(layout=Layout(data=2), zero_stage=1, **FP32)
    time = predicted(run)
    assert time.update == pytest.approx(calibrated.STEP + calibrated.ZERO_VALUE * values(run), rel=0.01)
    assert time.fixed == time.data == 0


def test_a_precision_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="was measured in fp32, and the run trains in bf16"):
        predicted(plan(on_cpu=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_with_their_own_cores_follow_the_ideal_timeline(name: str) -> None:
    shape = (name, 4, 8, SCHEDULES[name].default_chunks)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    orders = orders_of(*shape)
    length = makespan(orders, lambda action: seconds[action.kind], 0.0, lambda computing: 1.0)
    assert length == pytest.approx(ideal_timeline(*shape).length)
    slower = makespan(orders, lambda action: seconds[action.kind], 0.25, lambda computing: 1.0)
    assert slower >= length + 6 * 0.25


def test_on_one_core_stages_leave_nothing_idle() -> None:
    orders = orders_of("1f1b", 4, 4, 1)
    work = sum(3 if action.kind == "B" else 1 for order in orders for action in order)

    def seconds(action: Action) -> float:
        return 3.0 if action.kind == "B" else 1.0

    assert makespan(orders, seconds, 0.0, lambda computing: 1 / computing) == pytest.approx(work)


def test_the_alone_pace_counts_while_others_wait() -> None:
    machine = CalibratedMachine(calibrated.calibration(), 2)
    quick = [replace(measured, alone=2.0) for measured in machine.calibration.computing]
    faster = CalibratedMachine(replace(machine.calibration, computing=quick), 2)
    run = plan(layout=Layout(pipeline=2), **FP32)
    before, after = (step_time(run, each, largest_rank(run)).total for each in (machine, faster))
    assert after < before
