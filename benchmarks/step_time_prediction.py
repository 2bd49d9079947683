"""Predicted and measured seconds of a training step on the host, over configurations drawn by a seed.

    python -m benchmarks.step_time_prediction [--quick] [--seed N] [--cases 0:20] [--precisions fp32 fp32 bf16]
        [--calibration FILE] [--seconds 690]
    python -m benchmarks.step_time_prediction --again FILE

The machine is calibrated as `megalite plan --calibrate` does, unless a file of it is given; the prediction knows
nothing else. Then each configuration trains some steps, all ranks on this machine. Leave the machine alone meanwhile.
The result keeps the calibration and each row's settings, so that a test computes the predictions anew; --again writes
them anew after a change of the prediction.
"""

import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
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


def rows_of(
    drawn: Sequence[tuple[int, dict[str, Any]]], calibration: Calibration
) -> Iterator[dict[str, Any]]:
    for case, settings in drawn:
        config = config_of(settings)
        ranks = run_ranks(measured, config.layout.world_size, config)
        # Other work on the machine only ever makes a step slower.
        seconds = min(max(step) for step in zip(*ranks, strict=True))
        row: dict[str, Any] = {"case": case, "layout": config.layout.text, "settings": settings}
        row |= {
            "measured": round(seconds, 5),
            "steps": [round(max(step), 5) for step in zip(*ranks, strict=True)],
        }
        yield row | compared(row, calibration)


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
    """Calibrate this machine in these precisions, and write the file."""
    from megalite.train.step.calibrate import calibrate

    base = config_of(configurations(random.Random(SEED), 1)[0])
    runs = [base.in_precision(precision) for precision in dict.fromkeys(precisions)]
    write_calibration(calibrate(runs, int(base.model.vocab_size), gethostname()), file)


def _calibration(file: Path | None, precisions: Sequence[str]) -> Calibration:
    """Read the calibration, or measure this machine, in a process of its own: later ranks fork from this one."""
    if file is not None:
        return read_calibration(file)
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
    parser.add_argument("--seconds", type=float, default=inf, help="after these, no further configuration")
    parser.add_argument("--again", type=Path, metavar="FILE", help="a result whose rows to predict again")
    arguments = report.arguments_of(parser)
    if arguments.again:
        again(arguments.again)
        return
    started = time.monotonic()
    prepare_process()
    calibration = _calibration(arguments.calibration, arguments.precisions)
    facts = report.machine()
    first, last = map(int, arguments.cases.split(":"))
    generator = random.Random(arguments.seed)
    drawn = list(enumerate(configurations(generator, CASES, arguments.precisions)))[first:last]
    PRELOADED.append("megalite.train.step.part_times")
    rows = []
    for row in rows_of(drawn[:3] if arguments.quick else drawn, calibration):
        show(row)
        rows.append(row)
        if time.monotonic() - started > arguments.seconds:
            print(f"{len(rows)} of {len(drawn)} cases: the time is over")
            break
    show_errors(rows)
    settings = {"seed": arguments.seed, "precisions": arguments.precisions, "unit": "seconds"}
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
