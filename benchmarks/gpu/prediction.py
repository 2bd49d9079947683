"""The planner beside a card: peak memory and step time of configurations on one device, measured and predicted.

Memory: the peak of torch's allocator over the steps beside `planner.memory.largest_rank` without a base; on the CPU the
peak resident memory above what was resident before. Time: the median step beside `planner.step_time` with the
assumptions of `planner.cluster.Cluster`, on a card of its table. Nothing of the prediction was fitted to these rows.
"""

import gc
import platform
import statistics
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from benchmarks.gpu.training import MODEL, SEQUENCE_LENGTH, SEQUENCES, TINY
from benchmarks.memory_configurations import resolved
from megalite.checkpoint.manifest import Base
from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.errors import ConfigError
from megalite.monitor.memory import device_memory, process_memory
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.calibrated_step import CalibratedMachine, calibrated_seconds
from megalite.planner.cluster import Cluster, card_named
from megalite.planner.memory import largest_rank
from megalite.planner.planned_run import PlannedRun
from megalite.planner.step_time import step_time
from megalite.selftest.decide import KernelChoice, agreed_kernels
from megalite.train.step import train_step
from megalite.train.step.calibrate import calibrate
from megalite.train.step.calibration_probes import Probes
from megalite.train.step.part_times import RandomLoader
from megalite.train.step.precision import DTYPES

STEPS, WARM_UP, CALIBRATION = 5, 2, "calibration"
PLAIN = {"model.kernels": "reference"}
GPT = {"model.preset": "gpt2-medium", "training.sequence_length": 1024, "training.micro_batch_size": 16}
LORA = AdapterConfig(kind="lora", rank=16)
# Name -> settings; a model without a preset is the Llama of benchmarks/gpu/training.py.
CASES: dict[str, dict[str, Any]] = {
    "Llama 1.1B": {},
    "Llama, recompute full": {"training.recompute": "full"},
    "Llama, plain torch": PLAIN,
    "Llama, 8192 tokens": {"training.sequence_length": 8192, "training.micro_batch_size": 2},
    "Llama, LoRA": {"adapter": LORA},
    "Llama, chunked loss": {"model.chunked_loss": 1024},
    "GPT-2 medium, plain torch": GPT | PLAIN,
    "Llama, recompute selective": {"training.recompute": "selective"},
    "Llama, fp32, plain torch": PLAIN | {"training.precision": "fp32", "training.micro_batch_size": 2},
    "GPT-2 medium, recompute full, plain torch, lion": GPT
    | PLAIN
    | {"training.recompute": "full", "optimizer.name": "lion"},
    "Llama, 4096 tokens, gradients in bf16": {
        "training.sequence_length": 4096,
        "training.micro_batch_size": 4,
        "training.accumulation": "model",
    },
    "GPT-2 medium": GPT,
    "GPT-2 medium, plain torch, adafactor": GPT | PLAIN | {"optimizer.name": "adafactor"},
}
SMALL_GPT = {"model.vocab_size": 512, "model.hidden_size": 64, "model.intermediate_size": 128}
SMALL_GPT |= {"model.num_hidden_layers": 2, "model.num_attention_heads": 4, "model.num_key_value_heads": 4}


def prediction(
    device: str, names: Iterable[str] = tuple(CASES), *, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, tiny on the CPU or if asked for; a case that fails says why, and the others go on.

    On a card a last row has the times that `plan --calibrate` predicts for the cases from measurements of parts.
    """
    chosen: dict[tuple[Any, ...], KernelChoice] = {}
    runs: dict[str, PlannedRun] = {}
    for name in names:
        started = time.monotonic()
        try:
            config = case_config(CASES[name], tiny=tiny or device == "cpu")
            mesh = ParallelMesh.single(device)
            kernels = _kernels(config, mesh, chosen)
            runs[name] = PlannedRun.of(
                config,
                int(config.model.vocab_size),
                on_cpu=device == "cpu",
                plain_torch=kernels.name == "reference",
            )
            row = {"kernels": kernels.name} | _row(runs[name], _measured(config, mesh, kernels), device)
        except Exception as error:
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        if device != "cpu":
            torch.accelerator.memory.empty_cache()
        yield {"case": name, **row, "seconds": round(time.monotonic() - started, 1)}
    if device == "cuda" and runs:
        yield {"case": CALIBRATION} | calibrated(runs, case_config({}, tiny=False))


def case_config(settings: Mapping[str, Any], *, tiny: bool) -> RunConfig:
    """Return the resolved run of a case. tiny: of a small model, as the CPU trains it."""
    given = dict(settings)
    adapter = given.pop("adapter", None)
    model = {f"model.{name}": value for name, value in (TINY if tiny else MODEL).items()}
    if "model.preset" in given:
        model = SMALL_GPT if tiny else {}
    else:
        model["model.max_position_embeddings"] = given.get("training.sequence_length", SEQUENCE_LENGTH)
    values = {
        "training.sequence_length": SEQUENCE_LENGTH,
        "training.micro_batch_size": SEQUENCES,
        "training.micro_batches": 2,
        "training.precision": "bf16",
        "training.steps": STEPS,
        "model.kernels": "auto",
    }
    values |= model | given
    if tiny:
        values |= {
            "training.sequence_length": 32,
            "training.micro_batch_size": 2,
            "training.precision": "fp32",
        }
    config = resolved(values)
    if adapter is None:
        return config
    # A rule asks for the folder of the frozen weights, which are drawn here.
    weights = config.model.model_copy(update={"weights": "drawn"})
    return config.model_copy(update={"adapter": adapter, "model": weights})


def _row(run: PlannedRun, measured: dict[str, Any], device: str) -> dict[str, Any]:
    memory = largest_rank(run)
    row: dict[str, Any] = {"tokens": run.tokens * run.micro_batches} | measured
    row |= {"predicted_bytes": round(memory.peak)}
    row["memory_error"] = (
        round(memory.peak / measured["peak_bytes"] - 1, 4) if measured["peak_bytes"] else None
    )
    row["kinds"] = {kind: round(size) for kind, size in memory.kinds.items()}
    if device != "cuda":
        return row | {"no_time": "the planner has a table of cards only"}
    try:
        seconds = step_time(run, Cluster(card_named(torch.cuda.get_device_name()), cards_per_node=1), memory)
    except ConfigError as error:
        return row | {"no_time": error.problems[0].message}
    row |= {"predicted_seconds": round(seconds.total, 4), "time_parts": asdict(seconds)}
    return row | {"time_error": round(seconds.total / measured["step_seconds"] - 1, 4)}


def calibrated(
    runs: Mapping[str, PlannedRun], config: RunConfig, probes: Probes | None = None
) -> dict[str, Any]:
    """Return a calibration of this machine, about a minute, and the seconds of a step that it predicts by case.

    config: a run of the precision and the operators to measure.
    """
    try:
        calibration = calibrate([config], int(config.model.vocab_size), platform.node(), probes)
        machine = CalibratedMachine(calibration, cards_per_node=1)
    except Exception as error:
        traceback.print_exc()
        return {"left_out": f"{type(error).__name__}: {error}"[:300]}
    seconds: dict[str, float] = {}
    for name, run in runs.items():
        with suppress(ConfigError):  # another precision
            seconds[name] = round(sum(calibrated_seconds(run, machine).values()), 4)
    return {"calibrated": seconds, "calibration": asdict(calibration)}


def _kernels(
    config: RunConfig, mesh: ParallelMesh, chosen: dict[tuple[Any, ...], KernelChoice]
) -> KernelChoice:
    """Return the operators of a case; those proved for a model's first case serve all cases in its dtype."""
    shape, precision = config.shape(int(config.model.vocab_size)), config.training.precision
    key = (config.model.kernels, shape.hidden_size, shape.num_hidden_layers, precision)
    if key not in chosen:
        chosen[key] = agreed_kernels(config, shape, DTYPES[precision], mesh, leads_node=True)[0]
    return chosen[key]


def _measured(config: RunConfig, mesh: ParallelMesh, kernels: KernelChoice) -> dict[str, Any]:
    """Train some steps; return the peak bytes, the median seconds of a step and the losses."""
    device = mesh.device
    before = _start_peak(device)
    with ExitStack() as stack:
        if config.adapter.kind != "none":
            base = mock.patch.object(train_step, "base_of", lambda weights: Base(str(weights), "drawn"))
            stack.enter_context(base)
        loader = cast(StepLoader, RandomLoader(config, mesh))
        shape = config.shape(int(config.model.vocab_size))
        trainer = train_step.TrainStep(config, mesh, shape, loader, kernels=kernels)
        with trainer.batches:
            reports = [trainer.train_step() for _ in range(STEPS)]
        seconds = statistics.median(report.step_seconds for report in reports[WARM_UP:])
        row = {"step_seconds": round(seconds, 4), "last_loss": reports[-1].loss, "before_bytes": before}
        return row | _peak(device, before)


def _start_peak(device: torch.device) -> int:
    """Start a new peak; return the bytes in use now."""
    gc.collect()
    if device.type != "cpu":
        memory = device_memory(device)
        return memory.now_bytes if memory else 0
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return process_memory().now_bytes


def _peak(device: torch.device, before: int) -> dict[str, int]:
    """Return the peak; on a card also what its allocator reserved, and what the card has beside it."""
    if device.type == "cpu":
        return {"peak_bytes": process_memory().peak_bytes - before}
    memory = device_memory(device)
    if memory is None:
        return {"peak_bytes": 0}
    free, total = torch.get_device_module(device).mem_get_info(device)
    held = torch.accelerator.memory.memory_reserved(device)
    return {
        "peak_bytes": memory.peak_bytes,
        "reserved_bytes": memory.reserved_bytes or 0,
        "beside_bytes": total - free - held,
    }
