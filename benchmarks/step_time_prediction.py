"""Predicted and measured seconds of a training step on the host, over configurations drawn by a seed.

    python -m benchmarks.step_time_prediction [--quick] [--seed N] [--cases 0:20] [--precisions fp32 fp32 bf16]
        [--passes 3] [--calibration FILE]
    python -m benchmarks.step_time_prediction --again FILE

The machine is calibrated as `megalite plan --calibrate` does, unless a file of it is given; the prediction knows
nothing else. Then each configuration trains some steps, all ranks on this machine. Leave the machine alone meanwhile.
A shared machine is up to twice as slow for minutes: each pass measures a round of the calibration and all
configurations, and the least of each time counts. The result keeps the calibration and each row's settings, so that a
test computes the predictions anew; --again writes them anew after a change of the prediction.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from socket import gethostname
from typing import Any, cast
from unittest import mock

from benchmarks import report
from benchmarks.memory_configurations import resolved
from benchmarks.ranks import PRELOADED, run_ranks
from benchmarks.step_time_configurations import configurations
from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.launcher.process import available_cores, keep_freed_memory
from megalite.launcher.rank.environment import prepare_process
from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import (
    Calibration,
    calibration_of,
    read_calibration,
    write_calibration,
)
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.planner.step_time import StepTime, step_time

SEED, CASES, STEPS, WARM_UP, GOAL = 3215, 44, 6, 1, 0.15


def config_of(settings: Mapping[str, Any]) -> RunConfig:
    given = {"training.steps": 1000, **settings}
    rank = given.pop("lora")
    config = resolved(given)
    if not rank:
        return config
    # A rule asks for the folder of the frozen weights, which are drawn here.
    weights = config.model.model_copy(update={"weights": "drawn"})
    return config.model_copy(update={"adapter": AdapterConfig(kind="lora", rank=rank), "model": weights})


def predicted(config: RunConfig, calibration: Calibration) -> StepTime:
    run = PlannedRun.of(config, int(config.model.vocab_size), on_cpu=True)
    machine = CalibratedMachine(calibration, config.layout.world_size)
    return step_time(run, machine, largest_rank(run))


def measured(config: RunConfig) -> list[float]:
    """Return the seconds of each timed step on this rank."""
    import torch

    from megalite.checkpoint.manifest import Base
    from megalite.parallel.mesh import ParallelMesh
    from megalite.train.step import train_step
    from megalite.train.step.part_times import RandomLoader

    keep_freed_memory()
    torch.set_num_threads(max(1, available_cores() // config.layout.world_size))
    mesh = ParallelMesh.over_world(config.layout, sequence_parallel=config.parallel.sequence)
    shape = config.shape(int(config.model.vocab_size))
    with ExitStack() as stack:
        if config.adapter.kind != "none":
            base = mock.patch.object(train_step, "base_of", lambda weights: Base(str(weights), "drawn"))
            stack.enter_context(base)
        trainer = train_step.TrainStep(config, mesh, shape, cast(StepLoader, RandomLoader(config, mesh)))
        with trainer.batches:
            return [trainer.train_step().step_seconds for _ in range(STEPS)][WARM_UP:]


def steps_of(settings: Mapping[str, Any]) -> list[float]:
    """Return the seconds of each timed step, of the slowest rank of each."""
    config = config_of(settings)
    ranks = run_ranks(measured, config.layout.world_size, config)
    return [round(max(step), 5) for step in zip(*ranks, strict=True)]


def row_of(
    case: int, settings: Mapping[str, Any], steps: Sequence[float], calibration: Calibration
) -> dict[str, Any]:
    # Other work on the machine only ever makes a step slower.
    row = {"case": case, "layout": config_of(settings).layout.text, "settings": settings}
    row |= {"measured": min(steps), "steps": steps}
    return row | compared(row, calibration)


def compared(row: Mapping[str, Any], calibration: Calibration) -> dict[str, Any]:
    """Return the prediction of a row, and its error."""
    time = predicted(config_of(row["settings"]), calibration)
    parts = {name: round(seconds, 5) for name, seconds in asdict(time).items()}
    return {
        "predicted": round(time.total, 5),
        "error": round(time.total / row["measured"] - 1, 4),
        "parts": parts,
    }


def measure_machine(file: Path, precisions: Sequence[str]) -> None:
    """Calibrate this machine in these precisions, one round, and write the file."""
    from megalite.train.step.calibrate import calibrate
    from megalite.train.step.calibration_probes import ON_CPU

    base = config_of(configurations(random.Random(SEED), 1)[0])
    runs = [base.in_precision(precision) for precision in dict.fromkeys(precisions)]
    probes = replace(ON_CPU, rounds=1)
    write_calibration(calibrate(runs, int(base.model.vocab_size), gethostname(), probes), file)


def calibrated(precisions: Sequence[str]) -> Calibration:
    """Measure this machine in a process of its own: later ranks fork from this one."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "calibration.json"
        spawned = multiprocessing.get_context("spawn")
        process = spawned.Process(target=measure_machine, args=(written, precisions))
        process.start()
        process.join()
        return read_calibration(written)


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--cases", default=f"0:{CASES}", help="first:last of the configurations")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--calibration", type=Path, metavar="FILE")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--again", type=Path, metavar="FILE", help="a result whose rows to predict again")
    arguments = report.arguments_of(parser)
    if arguments.again:
        again(arguments.again)
        return
    prepare_process()
    facts = report.machine()
    first, last = map(int, arguments.cases.split(":"))
    generator = random.Random(arguments.seed)
    drawn = list(enumerate(configurations(generator, CASES, arguments.precisions)))[first:last]
    drawn = drawn[:3] if arguments.quick else drawn
    PRELOADED.append("megalite.train.step.part_times")
    calibrations = [read_calibration(arguments.calibration)] if arguments.calibration else []
    steps: dict[int, list[float]] = {}
    for done in range(arguments.passes):
        if not arguments.calibration:
            calibrations.append(calibrated(arguments.precisions))
        for case, settings in drawn:
            steps.setdefault(case, []).extend(steps_of(settings))
            print(f"pass {done + 1}: {case:2} {min(steps[case]):.4f}", flush=True)
        write(calibrations, steps, drawn, facts, arguments)


def write(
    calibrations: Sequence[Calibration],
    steps: Mapping[int, Sequence[float]],
    drawn: Sequence[tuple[int, dict[str, Any]]],
    facts: Any,
    arguments: argparse.Namespace,
) -> None:
    """Predict all rows by the least times so far, and write the result."""
    from megalite.train.step.calibrate import least_times

    calibration = calibration_of(least_times([asdict(each) for each in calibrations]))
    rows = [row_of(case, settings, steps[case], calibration) for case, settings in drawn]
    for row in rows:
        show(row)
    show_errors(rows)
    settings = {"seed": arguments.seed, "precisions": arguments.precisions, "unit": "seconds"}
    passes = len(next(iter(steps.values()))) // (STEPS - WARM_UP)
    settings |= {"passes": passes}
    settings |= {"calibration": asdict(calibration)}
    report.write("step-time-prediction", facts, settings, rows, arguments.results)


def again(file: Path) -> None:
    """Predict the measured rows of a file again from its calibration, and write the file."""
    kept = json.loads(file.read_text())
    kept["rows"] = [row | compared(row, calibration_of(kept["calibration"])) for row in kept["rows"]]
    for row in kept["rows"]:
        show(row)
    show_errors(kept["rows"])
    file.write_text(json.dumps(kept, indent=2) + "\n")


def show(row: Mapping[str, Any]) -> None:
    settings = " ".join(f"{key.split('.')[-1]}={value}" for key, value in row["settings"].items())
    figures = f"{row['measured']:.4f} {row['predicted']:.4f} {row['error']:+.1%}"
    print(f"{row['case']:2} {figures} {settings}", flush=True)


def show_errors(rows: Sequence[Mapping[str, Any]]) -> None:
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= GOAL for error in errors)
    share = f"{within} of {len(errors)} within {GOAL:.0%}"
    print(f"error: median {statistics.median(errors):.1%}, largest {max(errors):.1%}, {share}")


if __name__ == "__main__":
    main()
