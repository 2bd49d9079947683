"""The whole life of one rank: meet the others, find the inputs, resume, train, save, export."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.failures import explain
from megalite.checkpoint.folder import find_best, read_manifest
from megalite.config.output.write import write_resolved
from megalite.config.sections.schema import RunConfig
from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.files import local_folder
from megalite.convert.huggingface.new_rows import NewRows, new_rows
from megalite.convert.peft.export import export_adapter
from megalite.data.batches.loader import StepLoader
from megalite.data.batches.stream_loader import StreamLoader
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.rendezvous import Meeting
from megalite.launcher.exit_codes import INTERRUPTED
from megalite.launcher.rank.detect import LOOPBACK, RankInfo
from megalite.launcher.rank.environment import bind_rank
from megalite.monitor.memory import exhausted_memory_explained, process_memory
from megalite.monitor.work import working
from megalite.parallel.device import local_device
from megalite.parallel.mesh import ParallelMesh, all_or_none, connect, disconnect
from megalite.planner.memory import memory_line
from megalite.selftest.decide import agreed_kernels
from megalite.train.callbacks import Callback
from megalite.train.checkpoints.reference_table import ReferenceFile, give_reference_losses
from megalite.train.checkpoints.resume_check import change_notes
from megalite.train.checkpoints.resuming import to_resume
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.inputs import RunInputs, found_to_resume, prepare_inputs
from megalite.train.interruption import StopSignals, stop_signals
from megalite.train.loaders import held_out_sets, loader_maker, training_loader
from megalite.train.loop import StopConditions, TrainingLoop
from megalite.train.out_of_memory import KnownRun
from megalite.train.report import RunReporter, device_name
from megalite.train.run_folder import RunFolder
from megalite.train.shared_inputs import agreed_inputs, agreed_store
from megalite.train.start import data_line, stream_line
from megalite.train.start_record import record_start
from megalite.train.step.micro_batch import TrialRank, in_micro_batches
from megalite.train.step.options import context_method
from megalite.train.step.precision import DTYPES, Precision, choose_precision, set_tf32
from megalite.train.step.train_step import StartingPoint, TrainStep
from megalite.train.time_budget import TimeBudget
from megalite.train.validation import HeldOutSet


@dataclass(frozen=True)
class RankJob:
    """The job of every rank. threads: of torch. budget: the time that this start has; rank 0's counts.

    origins: as those of Trainer.
    """

    config: RunConfig
    threads: int
    callbacks: Sequence[Callback] = ()
    budget: TimeBudget = field(default_factory=TimeBudget)
    origins: Mapping[str, str] = field(default_factory=dict)


def train_rank(
    info: RankInfo, job: RankJob, signals: StopSignals | None = None, meeting: Meeting | None = None
) -> int:
    """Run one rank of a job, until its last step is saved and exported.

    signals: those that this process notes already.
    meeting: the other ranks of a launcher; None: this process is alone, or another one started and watches all ranks.
    Returns the exit code: 0 after the last step, 75 if a signal or the want of time stopped the run before. Raises
    KeyboardInterrupt after Ctrl-C; the run has saved a checkpoint then.
    """
    with stop_signals(job.config, info) if signals is None else nullcontext(signals) as noted:
        bind_rank(info, job.config.launch.bind_cores)  # before torch starts its threads, which inherit it
        torch.set_num_threads(job.threads)
        rank = _Rank(info, job, noted)
        # Ranks that we started run under the claim of the process that started them.
        claims = info.rank == 0 and info.launcher != "megalite"
        with rank.folder.claimed() if claims else nullcontext():
            return rank.run(meeting)


@dataclass(frozen=True)
class _Trained:
    """The work that remains for a rank once its last step is saved.

    last: the last checkpoint, if there is any. exit_code: 75 or 130 if the run was stopped before its last step.
    """

    config: RunConfig
    tokenizer_folder: Path | None
    reporter: RunReporter
    last: Path | None
    exit_code: int


class _Rank:
    """One rank of a job, in a folder that is this job's alone."""

    def __init__(self, info: RankInfo, job: RankJob, signals: StopSignals):
        self.info, self.job, self.stops = info, job, StopConditions(signals, job.budget)
        self.folder = RunFolder(Path(job.config.run.folder))
        self.leads_node = info.local_rank == 0
        self.known = KnownRun(job.config, job.config.layout.coordinates(info.rank).pp)
        self.at_start = process_memory()
        self.reporter: RunReporter | None = None
        # The address of rank 0's host, where trials of a micro batch meet.
        self.address = LOOPBACK

    def run(self, meeting: Meeting | None) -> int:
        """Join the process group, train, export, end the live view and the sinks; as `train_rank`."""
        code = 1
        try:
            code = self._run(meeting)
            return code
        except KeyboardInterrupt:
            code = INTERRUPTED
            raise
        finally:
            # An error is printed below the live view.
            if self.reporter is not None:
                self.reporter.close(code)

    def _run(self, meeting: Meeting | None) -> int:
        info, config, inputs = self.info, self.job.config, None
        if meeting is not None:
            self.address = meeting.address
            inputs = agreed_inputs(meeting, config, self.folder, leads_node=self.leads_node)
        device = local_device(info.local_rank, info.local_world_size)
        seconds = config.launch.collective_seconds
        connect(
            info.rank,
            info.world_size,
            device=device,
            rendezvous=info.rendezvous,
            store=None if meeting is None else agreed_store(meeting, seconds),
            timeout_seconds=seconds,
        )
        try:
            with self.folder.full_disk_explained(), exhausted_memory_explained(device, self.known.lines):
                trained = self._train(device, inputs)
        except BaseException:
            # Others may be gone, and leaving a broken group can hang, and the failure has not been reported yet.
            if info.world_size == 1:
                disconnect()
            raise
        disconnect()
        # Only now: the others need not wait while one rank writes and checks the export.
        if trained.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if trained.exit_code == 0 and info.rank == 0 and trained.last is not None:
            results = _finish(trained, trained.last, self.folder)
            trained.reporter.close(0)
            trained.reporter.summary(results, has_tokenizer=trained.tokenizer_folder is not None)
        return trained.exit_code

    def _train(self, device: torch.device, inputs: RunInputs | None) -> _Trained:
        """Prepare the inputs, build the TrainStep, resume, write run.toml, and train up to the last checkpoint."""
        info, config, folder, stops = self.info, self.job.config, self.folder, self.stops
        mesh = _mesh(config, device)
        if inputs is None:
            inputs = mesh.broadcast_object(prepare_inputs(config, folder) if mesh.rank == 0 else None)
            assert inputs is not None
        found = found_to_resume(config, folder) if mesh.rank == 0 else None
        resumption = to_resume(config, mesh, info.node, folder.checkpoints, found, inputs.data)
        resumed_from = resumption.source
        precision = _precision(config, mesh, resumed_from)
        config = config.in_precision(precision.name)
        _require_deepspeed_precision(config)
        tokenizer = _tokenizer(config, inputs)
        shape = config.shape(0 if tokenizer is None else tokenizer.vocab_size)
        self.known.resolved(config, shape.vocab_size)
        dtype = DTYPES[config.training.precision]
        kernels, tested = agreed_kernels(config, shape, dtype, mesh, leads_node=self.leads_node)
        # Behind the self-test, which measures exact products.
        set_tf32(device, config.training.tf32)
        weights = _initial_weights(inputs, mesh) if resumed_from is None or shape.adapter else None
        rank = TrialRank(info, mesh, self.address, self.job.threads)
        adapted = weights if shape.adapter else None
        config, chosen = in_micro_batches(
            config, shape.vocab_size, rank, kernels.name == "reference", adapted, resumed_from
        )
        self.known.resolved(config, shape.vocab_size)
        load = loader_maker(config, mesh, tokenizer)
        with working(_building(config, resumed_from), shown=mesh.rank == 0, stream=sys.stdout):
            start = StartingPoint(weights, _new_rows(config, tokenizer, weights), resumed_from is not None)
            trainer = TrainStep(
                config,
                mesh,
                shape,
                training_loader(config, inputs.data, load, mesh, tokenizer),
                start=start,
                kernels=kernels,
            )
            trainer.fingerprints = dict(inputs.data.fingerprints)
            held_out = held_out_sets(config, inputs.data, load, mesh, tokenizer)
            resumed_from = resumption.load(trainer)
        if mesh.rank == 0:
            write_resolved(config, folder.root / "run.toml")
            record_start(folder, trainer, info, self.job.origins, device_name(device), resumed_from)
        self.reporter = reporter = RunReporter(trainer, info, folder.metrics)
        reporter.say(_data_line(trainer, held_out))
        _tell_choices(reporter, trainer, precision, [chosen, tested, *inputs.data.notes])
        _give_reference(reporter, trainer, held_out, load, ReferenceFile(folder.reference, resumed_from))
        if resumed_from is not None:
            _tell_resumption(reporter, trainer, resumption.line(trainer.state.step), resumed_from)
        saver = RunSaver(trainer, folder.checkpoints, resumption, ranks_a_node=info.local_world_size)
        with trainer.batches:
            callbacks = self.job.callbacks
            loop = TrainingLoop(trainer, held_out, reporter, saver, callbacks=callbacks, stops=stops)
            reason = loop.run()
            stops.signals.all_saved()
            resumption.close()
        reporter.compare(self.at_start)
        if reason:
            reporter.say(f"stopped after step {trainer.state.step}: {reason}")
        return _Trained(config, inputs.data.tokenizer, reporter, loop.saved, loop.exit_code)


def _mesh(config: RunConfig, device: torch.device) -> ParallelMesh:
    return ParallelMesh.over_world(
        config.layout,
        device,
        sequence_parallel=config.parallel.sequence,
        context_method=context_method(config),
        collective_seconds=config.launch.collective_seconds,
    )


def _building(config: RunConfig, resumed_from: Path | None) -> str:
    begins_from = resumed_from or config.model.weights
    return f"loading {begins_from}" if begins_from else "building the model"


def _data_line(trainer: TrainStep, held_out: Mapping[str, HeldOutSet]) -> str:
    validated = sum(each.samples for each in held_out.values())
    if isinstance(trainer.loader, StreamLoader):
        return stream_line(trainer.config, trainer.loader.text.files, held_out=validated)
    samples = trainer.loader.samples_per_epoch
    return data_line(trainer.config, samples=samples, held_out=validated, steps=trainer.total_steps)


def _give_reference(
    reporter: RunReporter,
    trainer: TrainStep,
    held_out: Mapping[str, HeldOutSet],
    load: Callable[..., StepLoader],
    file: ReferenceFile,
) -> None:
    """Give the loaders of preferences the losses of the reference, unless each step computes them. Collective."""
    if trainer.needs_reference_losses:
        every = [trainer.loader, *(each.loader for each in held_out.values())]
        loaders = [each for each in every if isinstance(each, StepLoader)]
        with reporter.working("computing the reference's log-probabilities", "batches") as work:
            line = give_reference_losses(trainer, loaders, load, file, work.advance)
        reporter.say(line)


def _finish(trained: _Trained, last: Path, folder: RunFolder) -> dict[str, Path | str]:
    """Export the last or best checkpoint if asked for; return name -> path of the run's results, for the summary."""
    config = trained.config
    places: dict[str, Path | str] = {"checkpoint": last}
    best = find_best(folder.checkpoints) if config.checkpoint.best else None
    if best is not None:
        places["best"] = best
    places["metrics"] = folder.metrics
    places |= trained.reporter.places
    if config.checkpoint.export:
        exported = best if config.checkpoint.export == "best" and best is not None else last
        progress.begin(Activity.EXPORTING)
        write = export if config.adapter.kind == "none" else export_adapter
        with trained.reporter.working(f"exporting to {folder.export}"):
            write(exported, folder.export, trained.tokenizer_folder)
        if trained.tokenizer_folder is None:
            trained.reporter.say(
                f"{folder.export} has no tokenizer, because the training data has none: "
                "add --tokenizer FOLDER to megalite generate"
            )
        places["export"] = folder.export
    return places


def _tokenizer(config: RunConfig, inputs: RunInputs) -> Tokenizer | None:
    if inputs.data.tokenizer is None:
        return None
    return load_tokenizer(inputs.data.tokenizer, end_of_document=config.tokenizer.end_of_document)


def _new_rows(config: RunConfig, tokenizer: Tokenizer | None, weights: Path | None) -> NewRows | None:
    """Return the rows of the weights for tokens that the run adds to their tokenizer."""
    if tokenizer is None or weights is None:
        return None
    own = [] if config.tokenizer.path is None else [Path(config.tokenizer.path).expanduser()]
    return new_rows(tokenizer, config.tokenizer.add_tokens, [weights, *own])


def _initial_weights(inputs: RunInputs, mesh: ParallelMesh) -> Path | None:
    """Return the folder of `model.weights` on this machine, fetched where only rank 0's machine has it. Collective."""
    if (weights := inputs.weights) is None:
        return None
    return all_or_none(mesh, lambda: local_folder(weights), explain(mesh, "import", Path(weights)))


def _require_deepspeed_precision(config: RunConfig) -> None:
    """Raise ConfigError, on every rank, if DeepSpeed cannot train in the precision that "auto" stands for."""
    if config.zero_stage:
        # DeepSpeed costs seconds to import: only a run that uses it pays.
        from megalite.train.optimizer.deepspeed_ops import require_precision

        require_precision(config.training.precision, config.deepspeed_json())


def _tell_choices(
    reporter: RunReporter, trainer: TrainStep, precision: Precision, notes: Sequence[str]
) -> None:
    """Say memory, precision and operators of the run, and notes, such as that on the self-test; some may be empty."""
    reporter.say(
        memory_line(
            trainer.config,
            trainer.shape.vocab_size,
            on_cpu=trainer.mesh.device.type == "cpu",
            plain_torch=trainer.kernels.name == "reference",
        )
    )
    reporter.predict(trainer)
    if precision.warning:
        reporter.warn(precision.warning)
    if precision.note:
        reporter.say(precision.note)
    if trainer.mesh.device.type == "cpu":
        if trainer.config.training.empty_cache_every:
            reporter.say(
                "training.empty_cache_every has no effect: a CPU has no allocator cache to give back"
            )
        if trainer.config.training.offload_activations:
            reporter.say(
                "training.offload_activations has no effect: a CPU's activations are in host memory already"
            )
    if trainer.config.model.kernels != "reference":
        reporter.say(f"model.kernels: {trainer.kernels}")
    for note in filter(None, notes):
        reporter.say(note)


def _tell_resumption(reporter: RunReporter, trainer: TrainStep, line: str, checkpoint: Path) -> None:
    reporter.say(line)
    for note in change_notes(read_manifest(checkpoint).config, trainer.config):
        reporter.say(note)
    if trainer.state.step >= trainer.total_steps:
        reporter.say(f"nothing left to train: this run has {trainer.total_steps} steps")


def _precision(config: RunConfig, mesh: ParallelMesh, resumed_from: Path | None) -> Precision:
    """Resolve `training.precision`; rank 0 does so, so that all ranks compute alike."""
    chosen = None
    if mesh.rank == 0:
        written = read_manifest(resumed_from).config if resumed_from is not None else {}
        resumed = written.get("training", {}).get("precision")
        chosen = choose_precision(config.training.precision, mesh.device, resumed)
    precision: Precision = mesh.broadcast_object(chosen)
    return precision
