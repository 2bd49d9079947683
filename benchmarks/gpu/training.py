"""Whole training: a Llama of about 1.1 billion parameters through the Trainer, and the 3D job over CPU ranks."""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ranks import run_ranks
from benchmarks.workload import TOKENS, Setup, Training
from megalite.data.files.token_file import TokenWriter, bin_path, idx_path
from megalite.launcher.process import available_cores
from megalite.monitor.cards import peak_flops
from megalite.monitor.memory import device_memory
from megalite.topology.axes import Layout
from megalite.topology.flops import flops_per_token

# TinyLlama's shape: 1.1 billion parameters.
MODEL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
TINY = MODEL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SEQUENCE_LENGTH, SEQUENCES, MICRO_BATCHES, STEPS, WARM_UP = 2048, 8, 2, 10, 3
# Name of a row -> its settings.
KERNELS: dict[str, dict[str, str]] = {
    "reference": {"model.kernels": "reference"},
    "auto": {"model.kernels": "auto"},
    "torch.compile": {"model.kernels": "reference", "training.compile": "true"},
}
PROFILED = 12
"""Lines of the profile that a row keeps."""
# Ranks -> layout: an axis more each time, then more of each.
LAYOUTS = {
    1: Layout(),
    2: Layout(data=2),
    4: Layout(tensor=2, data=2),
    8: Layout(tensor=2, pipeline=2, data=2),
    16: Layout(tensor=2, pipeline=2, data=4),
}
SCALED_SEQUENCES, SCALED_STEPS = 8, 2


def _write_tokens(prefix: Path, count: int, vocab_size: int) -> None:
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        writer.add(np.random.default_rng(0).integers(0, vocab_size, count, dtype=np.uint16))
        writer.end_document()
        writer.finish()
        writer.close()


def train(kernels: str, *, device: str, product: float | None, tiny: bool = False) -> dict[str, Any]:
    """A few steps of the Trainer with these settings of KERNELS; one row. product: measured FLOP/s of bf16 products."""
    from megalite.config.load import load_run
    from megalite.data.batches.blend import SampleOrder
    from megalite.data.batches.loader import BatchShare, StepLoader
    from megalite.data.files.token_file import TokenFile
    from megalite.parallel.mesh import ParallelMesh
    from megalite.selftest.decide import agreed_kernels
    from megalite.train.step.train_step import TrainStep

    model = TINY if tiny else MODEL
    sequence, sequences, steps = (32, 2, 3) if tiny else (SEQUENCE_LENGTH, SEQUENCES, STEPS)
    values: dict[str, Any] = (
        {f"model.{name}": value for name, value in model.items()}
        | KERNELS[kernels]
        | {
            "training.steps": steps,
            "training.precision": "bf16",
            "training.sequence_length": sequence,
            "training.micro_batch_size": sequences,
            "training.micro_batches": MICRO_BATCHES,
            "tokenizer.path": "none is needed",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "tokens"
        _write_tokens(prefix, steps * sequences * MICRO_BATCHES * (sequence + 1) + 1, model["vocab_size"])
        values["data.source"] = str(prefix)
        words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
        config = load_run(None, words).config
        loader = StepLoader(
            TokenFile.open(prefix),
            BatchShare(sequence, micro_batch_size=sequences, micro_batches=MICRO_BATCHES),
            SampleOrder(seed=0),
        )
        shape = config.model.shape(model["vocab_size"])
        mesh = ParallelMesh.single(device)
        chosen, _ = agreed_kernels(config, shape, torch.bfloat16, mesh, leads_node=True)
        trainer = TrainStep(config, mesh, shape, loader, kernels=chosen)
        with trainer.batches:
            reports = [trainer.train_step() for _ in range(steps - 1)]
            profile = profiled(trainer.train_step, device)
        tokens, losses = trainer.tokens_per_step, [report.loss for report in reports]
        del trainer, loader
    gc.collect()
    seconds = statistics.median(report.step_seconds for report in reports[min(WARM_UP, len(reports) - 1) :])
    rate = flops_per_token(shape, sequence) * tokens / seconds
    row: dict[str, Any] = {"kernels": kernels, "chosen": str(chosen), "parameters": _parameters(shape)}
    row |= {"tokens": tokens, "profile": profile}
    row |= {"step_seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds)}
    row |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if device != "cpu":
        name = torch.cuda.get_device_name() if device == "cuda" else device
        peak, memory = peak_flops(name, "bf16"), device_memory(torch.device(device))
        row["mfu"] = round(rate / peak, 3) if peak else None
        row["share_of_product"] = round(rate / product, 3) if product else None
        row["peak_memory_gib"] = round(memory.peak_bytes / 2**30, 1) if memory else None
        torch.accelerator.memory.empty_cache()
    return row


def profiled(step: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """Run a step and return the device's kernels that took longest, the longest first, and the sum of all.

    Milliseconds of the device, and launches, of one step.
    """
    from torch.profiler import ProfilerActivity, profile

    on_card = device == "cuda"
    activity = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        step()
        if on_card:
            torch.cuda.synchronize()
    kernels = recorded.key_averages()
    spent = {
        each.key: (each.self_device_time_total if on_card else each.self_cpu_time_total) for each in kernels
    }
    launches = {each.key: each.count for each in kernels}
    longest = sorted(spent, key=lambda name: -spent[name])[:PROFILED]
    rows = [
        {"kernel": name[:100], "ms": round(spent[name] / 1e3, 3), "launches": launches[name]}
        for name in longest
    ]
    total = {"ms": round(sum(spent.values()) / 1e3, 3), "launches": sum(launches.values())}
    return [{"kernel": "all"} | total, *rows]


def _parameters(shape: Any) -> int:
    from megalite.topology.parameters import model_parameters

    return sum(parameter.numel for parameter in model_parameters(shape))


def _step_seconds(setup: Setup, steps: int) -> float:
    mesh = setup.mesh()
    training = Training(setup, mesh)
    training.step()
    seconds = []
    for _ in range(steps):
        mesh.barrier()
        started = time.perf_counter()
        training.step()
        mesh.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def scaling(most: int | None = None) -> list[dict[str, Any]]:
    """The 17M Llama of the other benchmarks, the same batch over ever more CPU ranks of one thread each."""
    cores = available_cores()
    rows: list[dict[str, Any]] = []
    for world, layout in LAYOUTS.items():
        if world > (cores if most is None else most):
            rows.append(
                {"ranks": world, "layout": str(layout), "left_out": f"this machine has {cores} cores"}
            )
            continue
        micro_batches = 2 if layout.pipeline > 1 else 1
        setup = Setup(layout, micro_batches=micro_batches, sequences=SCALED_SEQUENCES)
        seconds = max(run_ranks(_step_seconds, world, setup, SCALED_STEPS))
        tokens = TOKENS * SCALED_SEQUENCES // 4
        rows.append(
            {
                "ranks": world,
                "layout": f"tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}",
                "step_seconds": round(seconds, 3),
                "tokens_per_second": round(tokens / seconds),
                "speedup": round(rows[0]["step_seconds"] / seconds, 2) if rows else 1.0,
            }
        )
    return rows
