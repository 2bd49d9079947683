"""What a run tells: metrics.jsonl, the console, the summary. All ranks call it alike; rank 0 writes and speaks."""

import math
import time
from pathlib import Path

import torch

from megalite.launcher.environment import RankInfo
from megalite.launcher.process import available_cores
from megalite.monitor.console import Console, RunSummary
from megalite.monitor.jsonl import MetricsFile, read_metrics
from megalite.monitor.memory import device_memory, process_memory
from megalite.monitor.metrics import StepMetrics
from megalite.monitor.throughput import (
    Throughput,
    flops_per_token,
    gpu_flops_per_second,
    sgemm_flops_per_second,
)
from megalite.parallel.mesh import ParallelMesh
from megalite.train.trainer import StepReport, Trainer

# The loss "after" is a mean over so many last steps: one step's says as much about its batch as about the model.
_LAST_STEPS = 10


class RunReporter:
    """Turns step reports into metrics for people and files."""

    def __init__(self, trainer: Trainer, info: RankInfo, metrics_file: Path):
        self._mesh, self._every = trainer.mesh, trainer.config.monitor.every
        self._total_steps = trainer.total_steps
        self._scaled = trainer.config.training.precision == "fp16"
        self._tokens_per_step = trainer.tokens_per_step
        self._memory_bytes = 0
        self._started = time.perf_counter()
        self._path = metrics_file
        nodes = info.world_size // info.local_world_size
        peak = _peak_flops_per_second(trainer.mesh, info.world_size, nodes)
        self._throughput = Throughput(
            flops_per_token=flops_per_token(trainer.shape, trainer.config.training.sequence_length),
            peak_flops_per_second=peak,
        )
        self._metrics: MetricsFile | None = None
        self.console: Console | None = None
        if trainer.mesh.rank == 0:
            self._metrics = MetricsFile(metrics_file, after_step=trainer.state.step)
            on_cpu = trainer.mesh.device.type == "cpu"
            self.console = Console(
                total_steps=self._total_steps, every=self._every, peak="sgemm" if on_cpu else "peak"
            )

    def say(self, text: str) -> None:
        """A line on rank 0's console."""
        if self.console is not None:
            self.console.say(text)

    def warn(self, text: str) -> None:
        """A warning on rank 0's console."""
        if self.console is not None:
            self.console.warn(text)

    def step(self, report: StepReport) -> None:
        """Record one step; now and then collective, to find the rank that holds the most memory."""
        if not self._memory_bytes or report.step % self._every == 0 or report.step == self._total_steps:
            held = device_memory() if self._mesh.device.type == "cuda" else process_memory()
            self._memory_bytes = int(self._mesh.max_over_world(held.peak_bytes))
        if self._metrics is None or self.console is None:
            return
        speed = self._throughput.update(self._tokens_per_step, report.step_seconds)
        metrics = StepMetrics(
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            tokens=report.tokens,
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            memory_bytes=self._memory_bytes,
            step_seconds=report.step_seconds,
            data_seconds=report.data_seconds,
            loss_scale=report.loss_scale if self._scaled else None,
            skipped_steps=report.skipped_steps if self._scaled else None,
        )
        self._metrics.append(metrics.record())
        self.console.step(metrics)
        if report.overflow is not None:
            self.console.warn(
                f"step {report.step}: fp16 overflow in the gradient of {report.overflow}; the step is left out"
            )

    def summary(self, places: dict[str, Path]) -> None:
        """The last lines: the loss before and after, the speed, and where things lie."""
        if self._metrics is None or self.console is None:
            return
        self._metrics.close()
        records = read_metrics(self._path)
        # An overflow's loss may be none.
        losses = [record["loss"] for record in records if record["loss"] is not None] or [math.nan]
        self.console.summary(
            RunSummary(
                steps=len(records),
                tokens=records[-1]["tokens"],
                seconds=sum(record["step_seconds"] for record in records),
                first_loss=losses[0],
                last_loss=sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]),
                places=places,
            )
        )


def _peak_flops_per_second(mesh: ParallelMesh, world_size: int, nodes: int) -> float | None:
    """Of the whole job: measured on a CPU, on all cores of rank 0's node; from the data sheet on a GPU."""
    if mesh.device.type == "cuda":
        one = gpu_flops_per_second(torch.cuda.get_device_name(mesh.device))
        return one * world_size if one else None
    measured = 0.0
    if mesh.rank == 0:
        # The other ranks wait at the barrier, so all cores are free for this.
        threads = torch.get_num_threads()
        torch.set_num_threads(available_cores())
        measured = sgemm_flops_per_second()
        torch.set_num_threads(threads)
    mesh.barrier()
    return measured * nodes if mesh.rank == 0 else None
