"""Calibrations: the file and its errors, and what a step takes on an imagined machine whose rates are known."""

import json
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import ConfigError
from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import read_calibration, write_calibration
from megalite.planner.machine_rates import LayerWork, Passes, products_of
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.planner.shared_cores import makespan
from megalite.planner.stage_parameters import stage_counts
from megalite.planner.step_time import StepTime, step_time
from megalite.topology.adapter import PROJECTIONS, Lora
from megalite.topology.axes import Layout
from megalite.topology.collective_sizes import BUCKET_BYTES
from megalite.topology.parameters import model_parameters
from megalite.topology.schedule_timeline import ideal_timeline, orders_of
from megalite.topology.schedules import SCHEDULES, Action
from megalite.train.step.calibrate import least_times
from tests.support.parity import about
from tests.unit.planner import calibrated
from tests.unit.planner.plans import SHAPE, plan


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
    assert time.compute == about(compute)
    assert time.update == about(calibrated.VALUE * values(run))
    assert time.fixed == about(calibrated.STEP)
    assert time.total == about(compute + time.update + time.fixed)


def test_full_recomputation_repeats_the_forward_of_the_layers() -> None:
    run, again = plan(**FP32), plan(recompute="full", **FP32)
    layers = replace(run.shape, num_hidden_layers=16)
    both = micro_batch(replace(run, shape=layers)).forward - micro_batch(run).forward  # of eight layers more
    repeated = run.micro_batches * (both + 8 * calibrated.RECOMPUTED)
    assert predicted(again).compute - predicted(run).compute == about(repeated)


def test_selective_recomputation_repeats_the_attention() -> None:
    run, again = plan(**FP32), plan(recompute="selective", **FP32)
    attention = calibrated.ATTENTION * run.micro_batch_size * run.shape.hidden_size * run.sequence_length**2
    layers = run.micro_batches * run.shape.num_hidden_layers
    added = predicted(again).compute - predicted(run).compute
    assert added == about(layers * (attention + calibrated.RECOMPUTED))


def test_more_ranks_than_cores_take_turns() -> None:
    two, four = (plan(layout=Layout(data=ranks), **FP32) for ranks in (2, 4))
    assert predicted(four).compute == about(2 * predicted(two).compute)
    gradients = 4 * values(two)
    buckets = ceil(gradients / BUCKET_BYTES)
    sums = buckets * calibrated.LATENCY + calibrated.LINK_BYTE * gradients
    assert predicted(two).data == about(sums)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "planned"),
    [(2, 2, 1, 4), (4, 1, 4, 2), (6, 4, 1, 6), (6, 4, 1, 12), (16, 8, 2, 16), (16, 1, 16, 4)],
)
def test_replicas_have_no_bubble_on_any_number_of_cores(
    cores: int, ranks: int, threads: int, planned: int
) -> None:
    here = calibrated.calibration()
    computing = [replace(here.computing[-1], ranks=ranks, threads=threads)]
    links = [replace(here.links[0], ranks=ranks, group=ranks)]
    machine = CalibratedMachine(replace(here, units=cores, computing=computing, links=links), planned)
    run = plan(layout=Layout(data=planned), **FP32)
    time = step_time(run, machine, largest_rank(run))
    assert time.compute + time.bubble == about(time.compute)


def test_tensor_parallel_ranks_wait_for_their_sums() -> None:
    run = plan(layout=Layout(tensor=2), **FP32)
    hidden = 4 * run.tokens * run.shape.hidden_size
    one = calibrated.LATENCY + calibrated.LINK_BYTE * hidden
    sums = run.micro_batches * run.shape.num_hidden_layers * 4 * one
    assert sums < predicted(run).tensor < 1.4 * sums


def test_tensor_parallel_ranks_wait_for_each_other_as_their_layers_are_long() -> None:
    run = plan(layout=Layout(tensor=2), **FP32)
    slower = CalibratedMachine(calibrated.calibration(waiting=0.25), 2)
    work = LayerWork(run.micro_batch_size, run.sequence_length, 2, run.positions, 4)
    layer = calibrated.layer_passes(run.shape, work)
    waits = run.micro_batches * run.shape.num_hidden_layers * 0.25 * (layer.forward + layer.backward)
    # Half a layer's more for the embedding and for the head.
    added = step_time(run, slower, largest_rank(run)).tensor - predicted(run).tensor
    assert waits < added < waits * (1 + 1.1 / run.shape.num_hidden_layers)


def test_models_whose_layers_take_the_same_time_have_the_same_wait() -> None:
    here = calibrated.calibration(waiting=0.25)
    links = []
    for link in here.links:
        small = [time for time in link.models["fp32"] if time.model.hidden == calibrated.SMALL.hidden]
        links.append(replace(link, models={"fp32": [*small, *small]}))
    run = plan(layout=Layout(tensor=2), **FP32)
    time = step_time(run, CalibratedMachine(replace(here, links=links), 2), largest_rank(run))
    assert time.tensor > predicted(run).tensor


def test_zero_takes_what_its_steps_took() -> None:
    run = plan(layout=Layout(data=2), zero_stage=1, **FP32)
    time = predicted(run)
    assert time.update == about(calibrated.STEP + calibrated.ZERO_VALUE * values(run))
    assert time.fixed == time.data == 0


def test_zero_3_gathers_frozen_weights_too() -> None:
    shape = replace(SHAPE, adapter=Lora(4, 8.0, PROJECTIONS))
    run = plan(shape, layout=Layout(data=2), zero_stage=3, **FP32)
    small, here = (list(model_parameters(each)) for each in (calibrated.SMALL.shape, shape))
    sizes = [sum(parameter.numel for parameter in parameters) for parameters in (small, here)]
    start = (calibrated.STEP + calibrated.ZERO_VALUE * sizes[0]) * len(here) / len(small)
    assert predicted(run).update == about(start + calibrated.ZERO_VALUE * (sizes[1] - sizes[0]))


def test_the_least_time_of_several_rounds_counts() -> None:
    rounds = [
        {"ranks": 2, "alone": ratio, "models": [{"forward": time}]}
        for ratio, time in ((1.1, 3.0), (0.9, 2.0))
    ]
    assert least_times(rounds) == {"ranks": 2, "alone": 1.0, "models": [{"forward": 2.0}]}


def test_a_precision_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="was measured in fp32, and the run trains in bf16"):
        predicted(plan(on_cpu=True))


def test_axes_that_were_not_measured_are_refused() -> None:
    with pytest.raises(ConfigError, match="no times of experts, latent attention and context parallelism"):
        predicted(plan(layout=Layout(context=2), **FP32))


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_with_their_own_cores_follow_the_ideal_timeline(name: str) -> None:
    shape = (name, 4, 8, SCHEDULES[name].default_chunks)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    orders = orders_of(*shape)
    length = makespan(orders, lambda action: seconds[action.kind], 0.0, lambda computing: 1.0)
    assert length == about(ideal_timeline(*shape).length)
    slower = makespan(orders, lambda action: seconds[action.kind], 0.25, lambda computing: 1.0)
    assert slower >= length + 6 * 0.25


def test_on_one_core_stages_leave_nothing_idle() -> None:
    orders = orders_of("1f1b", 4, 4, 1)
    work = sum(3 if action.kind == "B" else 1 for order in orders for action in order)

    def seconds(action: Action) -> float:
        return 3.0 if action.kind == "B" else 1.0

    assert makespan(orders, seconds, 0.0, lambda computing: 1 / computing) == about(work)


def test_the_alone_pace_counts_while_others_wait() -> None:
    machine = CalibratedMachine(calibrated.calibration(), 2)
    quick = [replace(measured, alone=2.0) for measured in machine.calibration.computing]
    faster = CalibratedMachine(replace(machine.calibration, computing=quick), 2)
    run = plan(layout=Layout(pipeline=2), **FP32)
    before, after = (step_time(run, each, largest_rank(run)).total for each in (machine, faster))
    assert after < before


def test_an_adapter_takes_its_products_and_what_it_was_measured_to_add() -> None:
    run = plan(replace(SHAPE, adapter=Lora(4, 8.0, PROJECTIONS)), **FP32)
    # A and B of the fused queries, keys and values: B has a block for each.
    assert products_of(run.shape, 0, 1)[1:3] == [(64, 3 * 4, True), (3 * 4, 3 * 64, True)]
    without, with_ = (
        step_time(run, CalibratedMachine(calibrated.calibration(seconds), 2), largest_rank(run)).compute
        for seconds in (0.0, calibrated.ADAPTER)
    )
    linears = 4 * run.shape.num_hidden_layers * run.micro_batches
    assert with_ - without == about(2 * linears * calibrated.ADAPTER)
