"""Training on the card beside the CPU in float64: every family, optimizer and ZeRO stage of one rank, tiny.

python -m benchmarks.gpu.parity FILE      # write the CPU's losses and gradient norms: a process that sees no card
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.jobs import hidden_from_ranks
from megalite.config.sections.schema import OptimizerConfig
from megalite.topology.adapter import Lora, Prefix
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.options import Recompute, changed
from tests.support.tiny import FAMILY_SHAPES, tiny_shape
from tests.support.training import Job, train_on_rank

ROOT = Path(__file__).parents[2]
ADAMW = OptimizerSettings(OptimizerConfig(name="adamw", gradient_clipping=0.5))
WITH_ADAMW: dict[str, Any] = {"optimizer": ADAMW, "learning_rate": 1e-3}
FUSED: dict[str, Any] = {"kernels": "fused"}
JOBS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "AdamW": WITH_ADAMW,
    **{name: WITH_ADAMW | {"optimizer": changed(ADAMW, name=name)} for name in ("muon", "lion", "adafactor")},
    "documents": {"documents": True},
    "recompute, selective": {"recompute": Recompute("selective")},
    "recompute, full": {"recompute": Recompute("full")},
    "label smoothing, z-loss, chunks": {"label_smoothing": 0.1, "z_loss": 1e-3, "chunked_loss": 5},
    "torch.compile": {"compile": True},
    "prefix": {"shape": replace(tiny_shape(), adapter=Prefix(3, projection=10))},
    "LoRA": {"shape": replace(tiny_shape(), adapter=Lora(4, 8.0, ("q_proj", "v_proj")))},
    "compiled, AdamW": WITH_ADAMW | FUSED,
    "compiled, label smoothing, z-loss, chunks": FUSED
    | {"label_smoothing": 0.1, "z_loss": 1e-3, "chunked_loss": 5},
    # The tiny shapes' heads of 6 are served by torch's plain attention; these by the kernels.
    **{
        f"compiled, heads of 64, {name}": {"shape": replace(shape, head_dim=64), "documents": documents}
        | FUSED
        for name, shape, documents in (
            ("causal", tiny_shape(), False),
            ("documents", tiny_shape(), True),
            ("windows", FAMILY_SHAPES["mistral"], False),
        )
    },
    **{f"ZeRO {stage}": WITH_ADAMW | {"zero_stage": stage} for stage in (1, 2, 3)},
    **{f"family {name}": {"shape": shape} for name, shape in FAMILY_SHAPES.items()},
    **{
        f"compiled, documents, family {name}": {"shape": shape, "documents": True} | FUSED
        for name, shape in FAMILY_SHAPES.items()
    },
}
# The largest difference from the CPU's float64, relative; ZeRO's masters are float32.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-7}


def dtypes_of(job: dict[str, Any]) -> tuple[torch.dtype, ...]:
    """The compiled operators compute no float64, and DeepSpeed allows none on a card."""
    narrow = (torch.float32, torch.bfloat16)
    return narrow if "kernels" in job or "zero_stage" in job else (torch.float64,)


def run(job: dict[str, Any], dtype: torch.dtype, device: str) -> list[float]:
    """Two steps' losses, then their gradient norms."""
    result = train_on_rank(Job(**{"shape": tiny_shape(), "steps": 2, "dtype": dtype} | job, device=device))
    return [*result.losses, *result.norms]


def references(names: Sequence[str]) -> dict[str, list[float]]:
    plain = {"kernels": "reference", "compile": False}
    return {name: run(JOBS[name] | plain, torch.float64, "cpu") for name in names}


def parity(device: str, folder: Path, names: Sequence[str] = tuple(JOBS)) -> Iterator[dict[str, Any]]:
    """Yield a row for each job and dtype: how far the device's losses and norms are from the CPU's in float64."""
    file = folder / "references.json"
    command = [sys.executable, "-m", "benchmarks.gpu.parity", str(file), *names]
    made = subprocess.run(command, cwd=ROOT, env=hidden_from_ranks("cpu"), stderr=subprocess.PIPE, text=True)
    if made.returncode:
        print(made.stderr, file=sys.stderr)
        raise RuntimeError(f"the CPU's losses: exit code {made.returncode}: {made.stderr[-400:].strip()}")
    exact = json.loads(file.read_text())
    join("gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl")
    for name in names:
        job = JOBS[name]
        for dtype in dtypes_of(job):
            row = {"job": name, "dtype": str(dtype).removeprefix("torch.")}
            started = time.monotonic()
            try:
                pairs = zip(exact[name], run(job, dtype, device), strict=True)
                apart = max(abs(one - other) / abs(one) for one, other in pairs)
                row |= {"apart": apart, "right": apart <= BOUNDS[dtype]}
            except Exception as error:
                traceback.print_exc()
                row |= {"failed": f"{type(error).__name__}: {error}"[:200], "right": False}
            yield row | {"seconds": round(time.monotonic() - started, 1)}


def join(backend: str) -> None:
    """Make the process group of one rank, which ZeRO's engine asks for."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    join("gloo")
    Path(sys.argv[1]).write_text(json.dumps(references(sys.argv[2:] or [*JOBS])))
