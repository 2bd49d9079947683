"""The trial of a micro batch: `python -m megalite.train.step.trial` runs two steps of a rank, whose memory may run out.

Each rank starts one, so that nothing of it is left in the rank. The second step has the optimizer's state beside its
activations. Weights and ids are drawn: only sizes count.
"""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from megalite.config.output.summary import memory_text
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.errors import MemoryExhausted
from megalite.launcher.process import die_with_parent, end_process
from megalite.monitor.memory import device_memory, memory_error, process_memory
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh, connect, reach_store
from megalite.parallel.step_batch import StepBatch
from megalite.planner.memory import CARD_BASE_BYTES
from megalite.train.step.options import context_method
from megalite.train.step.part_times import RandomLoader
from megalite.train.step.precision import set_tf32
from megalite.train.step.train_step import StartingPoint, TrainStep

FULL = 3
"""The exit code where memory ran out."""
_STEPS = 2


@dataclass(frozen=True)
class TrialJob:
    """The work of the trial of one rank. address, port: of the store where the trials meet. parent: the rank's process.

    limit_bytes: more may not be used, though there may be more. weights: only beside an adapter.
    """

    config: dict[str, Any]
    vocab_size: int
    weights: str | None
    rank: int
    local_rank: int
    local_ranks: int
    threads: int
    limit_bytes: float
    address: str
    port: int
    parent: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class _TrialLoader(RandomLoader):
    """Random rows that keep as much memory as those of the run."""

    def steps_for_epochs(self, epochs: float, *, after: int = 0) -> int:
        return _STEPS

    def step_batch(self, consumed_samples: int, *, dtype: torch.dtype) -> StepBatch:
        batch, data = super().step_batch(consumed_samples, dtype=dtype), self._config.data
        if data.document_mask or data.kind != "text":
            batch = replace(batch, document_ids=torch.zeros_like(batch.input_ids))
        if data.kind == "preference":
            batch = replace(batch, reference=torch.zeros(len(batch.input_ids), dtype=torch.float64))
        return batch


def trial_bytes(config: RunConfig, mesh: ParallelMesh, vocab_size: int, weights: Path | None) -> float:
    """Run two steps of the run and return this rank's peak of memory, in bytes. Collective."""
    model = config.model.model_copy(update={"vocab_size": config.shape(vocab_size).vocab_size})
    config = config.model_copy(update={"model": model})
    loader = cast(StepLoader, _TrialLoader(config, mesh))
    step = TrainStep(config, mesh, config.shape(vocab_size), loader, start=StartingPoint(weights))
    with step.batches:
        for _ in range(_STEPS):
            step.train_step()
    used = process_memory() if mesh.device.type == "cpu" else device_memory(mesh.device)
    if used is None:
        return 0.0
    return used.peak_bytes if used.reserved_bytes is None else used.reserved_bytes + CARD_BASE_BYTES


def _run(job: TrialJob) -> None:
    torch.set_num_threads(job.threads)
    config = RunConfig.model_validate(job.config)
    device = local_device(job.local_rank, job.local_ranks)
    seconds = config.launch.collective_seconds
    store = reach_store(job.address, job.port, seconds)
    connect(job.rank, config.layout.world_size, device=device, store=store, timeout_seconds=seconds)
    mesh = ParallelMesh.over_world(
        config.layout,
        device,
        sequence_parallel=config.parallel.sequence,
        context_method=context_method(config),
        collective_seconds=seconds,
    )
    set_tf32(device, config.training.tf32)
    weights = None if job.weights is None else Path(job.weights)
    used = trial_bytes(config, mesh, job.vocab_size, weights)
    if used > job.limit_bytes:
        raise MemoryExhausted(f"{memory_text(used)} are more than {memory_text(job.limit_bytes)}")
    mesh.barrier()


def main() -> None:
    """Run the trial that standard input describes; exit with FULL where memory runs out."""
    job = TrialJob(**json.load(sys.stdin))
    die_with_parent(job.parent)
    # Where the kernel has to kill a process for its memory, it kills this one.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        _run(job)
    except Exception as error:
        cause = error if isinstance(error, MemoryExhausted) else memory_error(error)
        _say(cause or error)
        end_process(1 if cause is None else FULL)
    end_process(0)


def _say(error: BaseException) -> None:
    """Write the error to standard output, whose last line the rank reads."""
    text = str(error) if isinstance(error, MemoryExhausted) else f"{type(error).__name__}: {error}"
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


if __name__ == "__main__":
    main()
