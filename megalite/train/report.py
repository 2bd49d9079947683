"""Reports of a run: its sinks, the console, the summary. All ranks call it alike; rank 0 writes and prints."""

import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megalite.config.sections.schema import RunConfig
from megalite.errors import listed
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.step_trace import TRACES, TracedStepFacts, step_folder
from megalite.launcher.rank.detect import RankInfo
from megalite.monitor.cards import peak_flops
from megalite.monitor.console import Console, RunSummary
from megalite.monitor.jsonl import newest_records, read_metrics
from megalite.monitor.losses import EpochLoss
from megalite.monitor.memory import MemoryUse
from megalite.monitor.metrics import AT_THE_START, SaveMetrics, StepMetrics, ValidationMetrics
from megalite.monitor.profiler import HOW_TO_READ, StepProfile
from megalite.monitor.run_view import skipped_line
from megalite.monitor.sink import ReportedRun
from megalite.monitor.sinks import RunSinks
from megalite.monitor.step_tracer import StepTracer
from megalite.monitor.throughput import Throughput, gemm_flops_per_second
from megalite.monitor.work import Work, working
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.parameter_count import ParameterCount
from megalite.planner.planned_run import PlannedRun
from megalite.planner.prediction import RunPrediction, calibration_here, predict_run
from megalite.topology.flops import flops_per_token
from megalite.train.step.precision import DTYPES
from megalite.train.step.rank_measures import RankMeasures, RankReport
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep
from megalite.train.step.update_policy import describe_result, describe_spike, skip_record

# The number of last steps whose mean loss the summary shows.
_LAST_STEPS = 10
# The matrix products that a measured peak is of, by precision; BLAS names the first two.
_GEMMS = {"fp32": "sgemm", "fp64": "dgemm", "bf16": "bf16 gemm", "fp16": "fp16 gemm"}


class RunReporter:
    """Turns step reports into metrics for people and files."""

    def __init__(self, trainer: TrainStep, info: RankInfo, metrics_file: Path):
        self._mesh, self._every = trainer.mesh, trainer.config.monitor.every
        self._total_steps = trainer.total_steps
        self._scaled = trainer.config.training.precision == "fp16"
        training = trainer.config.training
        self._skips = self._scaled or {training.nonfinite, training.loss_spike} & {"skip", "rollback"}
        self._continues_text = trainer.config.data.kind == "text"
        self._groups = trainer.config.optimizer.groups
        self._ranks_a_node = info.local_world_size
        self.measures = RankMeasures(trainer.mesh, info)
        self._of_ranks: RankReport | None = None
        self._prediction: RunPrediction | None = None
        # The seconds of the steps that are not profiled.
        self._seconds = array("d")
        self._spiked, self._epoch_loss = False, EpochLoss()
        # For the next step's record: the facts of a start, the costs of a save.
        self._unrecorded: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._path = metrics_file
        self._profiles = metrics_file.parent / "profiles"
        self._monitor = trainer.config.monitor
        peak = _peak_flops_per_second(trainer.mesh, trainer.config, info)
        self._flops_per_token = cache(partial(flops_per_token, trainer.shape))
        self._throughput = Throughput(peak_flops_per_second=peak)
        self._tracer = _tracer(trainer, info, metrics_file.parent / TRACES)
        self._sinks: RunSinks | None = None
        self.console: Console | None = None
        if trainer.mesh.rank == 0:
            on_cpu = trainer.mesh.device.type == "cpu"
            measured = on_cpu and trainer.config.monitor.peak_tflops is None
            named = _GEMMS[trainer.config.training.precision] if measured else "peak"
            self.console = Console(
                total_steps=self._total_steps, every=self._every, peak=named, mode=self._monitor.console
            )
            after_step = trainer.state.step or -1  # a validation at the start stands at step 0
            reported = ReportedRun(metrics_file.parent, trainer.config, after_step)
            self._sinks = RunSinks(reported, metrics_file, self.warn)
            # A run of steps ends no epoch, and its records may be many.
            of_steps = bool(trainer.config.training.steps)
            self._epoch_loss = EpochLoss(() if of_steps else newest_records(metrics_file))
            count = ParameterCount.of(trainer.shape)
            facts = (count.total, count.trained, count.total - count.trained, self._total_steps)
            self._unrecorded = dict(zip(AT_THE_START, facts, strict=True))
            if self.measures.note:
                self.say(self.measures.note)
            if peak is None:
                self.say(_no_peak(device_name(trainer.mesh.device), trainer.config.training.precision))

    def say(self, text: str) -> None:
        """A line on rank 0's console."""
        if self.console is not None:
            self.console.say(text)

    def warn(self, text: str) -> None:
        """A warning on rank 0's console."""
        if self.console is not None:
            self.console.warn(text)

    def working(self, title: str, unit: str = "", total: int | None = None) -> Work:
        """Return a phase between steps, which rank 0's console shows."""
        if self.console is None:
            return working(title, shown=False)
        return self.console.working(title, unit, total)

    def begin(self, step: int) -> None:
        """Show that the steps begin, and which chosen ones a resumed run has behind it. step: those that are done."""
        folders = {"profile_steps": self._profiles, "trace_steps": self._path.parent / TRACES}
        for key, folder in folders.items():
            steps = [
                n for n in getattr(self._monitor, key) if n <= step and not step_folder(folder, n).exists()
            ]
            if steps:
                self.say(
                    f"monitor.{key}: {listed([*map(str, steps)])} came before this start, and left nothing"
                )
        if self.console is not None:
            self.console.start(step, self._path)

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Profile what runs inside of the `with` block on the ranks that are asked for, if the step is.

        Collective at the end of a profiled step, so that rank 0 can say what failed.
        """
        if step not in self._monitor.profile_steps:
            yield
            return
        folder = step_folder(self._profiles, step)
        ranks = [rank for rank in self._monitor.profile_ranks if rank < self._mesh.layout.world_size]
        profile = None
        if self._mesh.rank in ranks:
            profile = StepProfile(self._mesh.device, folder, self._mesh.rank)
        progress.begin(Activity.PROFILING)
        with nullcontext() if profile is None else profile:
            yield
            progress.begin(Activity.PROFILING)
        self._any_failed(f"profile of step {step}", "" if profile is None else profile.failure)
        progress.begin(Activity.BETWEEN_STEPS)
        if ranks:
            self.say(f"profiled step {step}: {folder}; {HOW_TO_READ}")

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Run a step and all that follows until the next, traced if monitor.trace_steps has the step.

        Collective behind a traced step, so that rank 0 can say what failed.
        """
        with self._tracer.step(step) as traced:
            yield
        if traced and not self._any_failed(f"trace of step {step}", self._tracer.failure):
            self.say(f"traced step {step}: megalite timeline {self._path.parent} --step {step}")

    def _any_failed(self, title: str, failure: str) -> bool:
        """Warn of each rank's failure; return whether there is one, on rank 0. Collective. failure: of this rank."""
        failures = self._mesh.gather_objects(failure) or []
        for rank, text in enumerate(failures):
            if text:
                self.warn(f"{title}, rank {rank}: {text}")
        return any(failures)

    def saved(self, metrics: SaveMetrics) -> None:
        """Record a checkpoint that was published, and hand it to the services that are to have it."""
        if self._sinks is not None and self.console is not None:
            self._unrecorded |= metrics.record()
            if self._monitor.log_checkpoints:
                progress.begin(Activity.UPLOADING)
                self._sinks.checkpoint(metrics.path)
                progress.begin(Activity.BETWEEN_STEPS)
            self.console.saved(metrics)

    def took(self, what: str, seconds: float) -> None:
        """Record the seconds of something between two steps. what: their name in the records."""
        self._unrecorded[what] = seconds

    def start(self, validation: ValidationMetrics, custom: Mapping[str, float]) -> None:
        """Record the validation of a run that has not made a step yet, and what callbacks add to it."""
        if self._sinks is not None and self.console is not None:
            self._sinks.append({"step": validation.step, **validation.record(), **custom})
            self.console.validation(validation)

    def step(
        self,
        report: StepReport,
        validation: ValidationMetrics | None,
        custom: Mapping[str, float],
        *,
        writes: bool = False,
    ) -> None:
        """Record one step, the validation after it, and what callbacks add.

        Every monitor.every steps collective, to gather the measures of all ranks.
        writes: whether a rank wrote a checkpoint beside the step.
        """
        profiled = report.step in self._monitor.profile_steps
        self.measures.add(report, disturbed=writes or profiled)
        of_ranks = self._of_all_ranks(report.step)
        if not profiled:
            self._seconds.append(report.step_seconds)
        if self._sinks is None or self.console is None:
            return
        flops = report.batch_tokens * self._flops_per_token(report.sequence_length)
        speed = self._throughput.update(report.batch_tokens, flops, report.step_seconds)
        metrics = StepMetrics(
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            tokens=report.tokens,
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            memory_bytes=of_ranks.memory_bytes,
            reserved_bytes=of_ranks.reserved_bytes,
            step_seconds=report.step_seconds,
            data_seconds=report.data_seconds,
            loss_scale=report.loss_scale if self._scaled else None,
            skipped_steps=report.skipped_steps if self._skips else None,
            custom=custom,
            figures=report.figures,
            group_rates={
                group.pattern: report.learning_rate * group.learning_rate_ratio for group in self._groups
            },
            layers=report.layers,
            of_ranks=of_ranks.record,
            loss_spike=report.loss_spike,
            epoch=report.epoch,
            **skip_record(report),
            epoch_loss=self._epoch_loss.add(report.loss, ends=report.epoch is not None),
        )
        validated = {} if validation is None else validation.record()
        self._sinks.append({**metrics.record(), **validated, **self._unrecorded})
        self._unrecorded = {}
        self.console.step(metrics)
        self._warn_of(report)
        if metrics.epoch is not None:
            self.console.say(f"epoch {metrics.epoch}: mean loss {metrics.epoch_loss:.4f}")
        if validation is not None:
            self.console.validation(validation)

    def _warn_of(self, report: StepReport) -> None:
        """Warn of a gradient that is not finite, of the first spike in a row, and of what followed."""
        spike = report.loss_spike
        if report.overflow is not None:
            what = "fp16 overflow in the gradient" if self._scaled else "an inf or nan in the gradient"
            self.warn(f"step {report.step}: {what} of {report.overflow}; {describe_result(report)}")
        if spike is not None and (report.skipped_for or not self._spiked):
            result = f"; {describe_result(report)}" if report.skipped_for else ""
            self.warn(f"step {report.step}: {describe_spike(report.loss, spike)}{result}")
        self._spiked = spike is not None

    def _of_all_ranks(self, step: int) -> RankReport:
        """Return the last measures of all ranks. Collective where a report is due: every monitor.every steps."""
        if self._of_ranks is None or step % self._every == 0 or step == self._total_steps:
            self._of_ranks = self.measures.report()
            for warning in self._of_ranks.warnings:
                self.warn(f"step {step}: {warning}")
            for note in self._of_ranks.notes:
                self.say(f"step {step}: {note}")
        return self._of_ranks

    def predict(self, trainer: TrainStep) -> None:
        """Predict memory and time of a step, and say the time where the card or a calibration is known."""
        mesh, device = trainer.mesh, trainer.mesh.device
        on_cpu, plain = device.type == "cpu", trainer.kernels.name == "reference"
        run = PlannedRun.of(trainer.config, trainer.shape.vocab_size, on_cpu=on_cpu, plain_torch=plain)
        nodes = mesh.layout.world_size // self._ranks_a_node
        name = device_name(device)
        calibration = calibration_here(name, run.precision, torch.__version__)
        self._prediction = predict_run(run, None if on_cpu else name, nodes, self._ranks_a_node, calibration)
        if self._prediction.line:
            self.say(self._prediction.line)

    def compare(self, at_start: MemoryUse) -> None:
        """Say what was predicted and what was measured. Collective, after the last step.

        at_start: the memory of this process before its first tensor.
        """
        if self._prediction is None or not self._seconds:
            return
        self.measures.measure_memory()
        peak, on_device = self.measures.peak_bytes, self.measures.on_device
        own = peak - (0 if on_device else at_start.now_bytes)
        if not on_device and peak <= at_start.peak_bytes:
            own = 0  # the inputs took more than the training: its own peak is not known
        largest = self._mesh.max_over_world(own)
        # The first step of a process warms up.
        steps = self._seconds[1:]
        if line := self._prediction.compared(largest, median(steps) if steps else None):
            self.say(line)

    @property
    def places(self) -> dict[str, Path | str]:
        """Where the sinks of monitor.report_to have their records, by name; empty on other ranks than 0."""
        return {} if self._sinks is None else self._sinks.places

    def close(self, exit_code: int) -> None:
        """End the live view and finish the sinks; exit_code: that of the run. The second call does nothing."""
        if self.console is not None:
            self.console.close()
        if self._sinks is not None:
            self._sinks.close(exit_code)

    def summary(self, places: Mapping[str, Path | str], *, has_tokenizer: bool) -> None:
        """Print the last lines: losses, speed, paths, and the command that generates text if there is a tokenizer."""
        if self._sinks is None or self.console is None:
            return
        asked = '--prompt "The"' if self._continues_text else "--chat"
        generate = f"megalite generate {self._path.parent} {asked} --temperature 0.8"
        records = read_metrics(self._path)
        steps = [record for record in records if "loss" in record]
        # An overflow's loss may be none.
        losses = [record["loss"] for record in steps if record["loss"] is not None] or [math.nan]
        self.console.summary(
            RunSummary(
                steps=len(steps),
                tokens=steps[-1]["tokens"] if steps else 0,
                seconds=sum(record["step_seconds"] for record in steps),
                first_loss=losses[0],
                last_loss=losses[-1],
                recent_loss=sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]),
                recent_steps=len(losses[-_LAST_STEPS:]),
                validation=_validation_line(records),
                skipped=skipped_line(steps),
                places=places,
                next_command=generate if has_tokenizer else "",
            )
        )


def _tracer(trainer: TrainStep, info: RankInfo, traces: Path) -> StepTracer:
    config, rank = trainer.config, trainer.mesh.rank
    layout, device = config.layout, trainer.mesh.device
    facts = TracedStepFacts(
        step=0,
        rank=rank,
        world_size=layout.world_size,
        place=asdict(layout.coordinates(rank)),
        host=info.node,
        device=device.type,
        schedule=config.parallel.schedule if layout.pipeline > 1 else "1f1b",
        stages=layout.pipeline,
        micro_batches=config.batch.micro_batches,
        chunks=config.split.chunks_per_stage,
    )
    return StepTracer(config.monitor.trace_steps, traces, facts, device)


def _validation_line(records: Sequence[Mapping[str, Any]]) -> str:
    """The last validation, and the best; empty where there was none."""
    validated = [record for record in records if record.get("validation_loss") is not None]
    if not validated:
        return ""
    last, best = validated[-1], min(validated, key=lambda record: record["validation_loss"])
    line = f"validation loss: {last['validation_loss']:.4f} after step {last['step']}"
    if best is not last:
        line += f", lowest {best['validation_loss']:.4f} after step {best['step']}"
    return line


def _peak_flops_per_second(mesh: ParallelMesh, config: RunConfig, info: RankInfo) -> float | None:
    """Return the figure for the whole job; None where it is not known.

    `monitor.peak_tflops`; else the figure of an accelerator's data sheet; on CPUs what matrix products in the run's
    precision reach when all ranks compute them at once, as they train: with their own threads, on shared cores.
    """
    on_cpu = mesh.device.type == "cpu"
    nodes = info.world_size // info.local_world_size
    if config.monitor.peak_tflops is not None:
        return config.monitor.peak_tflops * 1e12 * (nodes if on_cpu else info.world_size)
    if not on_cpu:
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        of_a_device = peak_flops(device_name(mesh.device), config.training.precision, tf32=tf32)
        return None if of_a_device is None else of_a_device * info.world_size
    mesh.barrier()
    [measured] = mesh.sum_over_world([gemm_flops_per_second(DTYPES[config.training.precision])])
    return measured


def device_name(device: torch.device) -> str:
    """Return the name of a card in torch, "cpu" or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _no_peak(device_name: str, precision: str) -> str:
    return (
        f'MFU is not shown: the peak of "{device_name}" in {precision} is not known; set monitor.peak_tflops to'
        f" the dense {precision} TFLOP/s of its data sheet"
    )
