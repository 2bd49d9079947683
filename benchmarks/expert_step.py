"""A whole training step of a small mixture beside transformers' Qwen3-MoE on the same cores: forward, backward, AdamW.

    python -m benchmarks.expert_step [--quick]

All start from the same weights and train on the same batch in float32, so that their losses are compared first. The
programs take turns in one process. A figure is the median over the rounds: with one thread of the processor's time,
with two of the time by the clock.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.peers import llama
from benchmarks.peers.plain_transformers import step_of
from benchmarks.workload import SHAPE, Setup, Training
from megalite.families.registry import hf_config
from megalite.launcher.process import keep_freed_memory
from megalite.model.options import ModelOptions
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest.decide import choose_kernels
from megalite.topology.experts import ExpertShape, MixtureShape

MIXTURES = {
    "32 experts of 256, 4 a token": ExpertShape(32, 4, 256),
    "8 experts of 512, 2 a token": ExpertShape(8, 2, 512),
}
QUICK = {"4 experts of 32, 2 a token": ExpertShape(4, 2, 32)}
THEIRS = ("eager", "grouped_mm")
ROUNDS, COMPARED_STEPS, LOSS_RTOL = 3, 2, 1e-4
COLUMNS = {
    **{"mixture": "mixture", "threads": "threads", "ms": "megalite ms"},
    **{f"{name} x": f"{name} / megalite" for name in THEIRS},
}


def _shape(experts: ExpertShape) -> MixtureShape:
    dense = replace(SHAPE, family="qwen3_moe", qk_norm="head", num_hidden_layers=4, tie_word_embeddings=False)
    return MixtureShape(**vars(dense), experts=experts)


def _theirs(shape: MixtureShape, folder: Path, implementation: str) -> Callable[[], float]:
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation=implementation)
    return step_of(model.train(), 0, 1).step


def _steps(shape: MixtureShape) -> dict[str, Callable[[], float]]:
    """Return the step of each program. Raises AssertionError if the losses of their first steps differ."""
    operators = choose_kernels("auto", "cpu").operators
    setup = Setup(shape=shape, options=ModelOptions(operators=operators))
    with tempfile.TemporaryDirectory() as folder:
        config = {**hf_config(shape, "float32", {}), "use_cache": False}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llama.write_initial_weights(Path(folder) / "model.safetensors", shape)
        steps = {name: _theirs(shape, Path(folder), name) for name in THEIRS}
    steps = {"ms": Training(setup, ParallelMesh.single()).step, **steps}
    losses = {name: [step() for _ in range(COMPARED_STEPS)] for name, step in steps.items()}
    for name in THEIRS:
        for ours, theirs in zip(losses["ms"], losses[name], strict=True):
            assert abs(ours - theirs) <= LOSS_RTOL * theirs, losses
    return steps


def _seconds(step: Callable[[], float], threads: int) -> float:
    clock = time.process_time if threads == 1 else time.perf_counter
    started = clock()
    step()
    return clock() - started


def _measure(steps: dict[str, Callable[[], float]], threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            seconds = _seconds(step, threads)
            if turn:  # libraries allocate memory on first use
                times[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "threads": threads,
        **{name: round(seconds * 1e3, 1) for name, seconds in medians.items()},
        **{f"{name} x": round(medians[name] / medians["ms"], 2) for name in THEIRS},
    }


def main() -> None:
    options = report.arguments(__doc__)
    keep_freed_memory()
    torch.set_num_threads(1)
    facts, rows = report.machine(), []
    for name, experts in (QUICK if options.quick else MIXTURES).items():
        measure = partial(_measure, _steps(_shape(experts)), rounds=2 if options.quick else ROUNDS)
        rows += [{"mixture": name, **measure(threads)} for threads in (1, 2)]
    report.show("a training step of a mixture", rows, COLUMNS)
    report.write("expert-step", facts, {"quick": options.quick, "rounds": ROUNDS}, rows, options.results)


if __name__ == "__main__":
    main()
