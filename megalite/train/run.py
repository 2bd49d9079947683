"""Training from Python: `Trainer(config).train()` does what `megalite train` does, which is made of it. No torch.

Like the command it is a rank where a launcher started it, trains here where one rank is enough, and else starts the
ranks: forked from this process, or spawned where a fork could not compute.
"""

import multiprocessing
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal

from megalite.checkpoint.copies_folder import reclaimable_bytes
from megalite.checkpoint.folder import find_best, find_checkpoint, find_latest
from megalite.config.sections.derived import offload_devices
from megalite.config.sections.schema import RunConfig
from megalite.convert.foreign.formats import require_not_foreign
from megalite.errors import ConfigError, LaunchError, Problem
from megalite.launcher.control.member import JobEnded
from megalite.launcher.control.rank_process import RankEnd, run_rank
from megalite.launcher.exit_codes import INTERRUPTED, NOT_BEGUN, STOPPED, TERMINATED
from megalite.launcher.local import LocalStart, Terminated, run_local_ranks
from megalite.launcher.process import die_with_parent
from megalite.launcher.rank.detect import RankInfo, rank_info
from megalite.launcher.rank.environment import meets_others, prepare_process, watched_by_launcher, with_master
from megalite.launcher.rank.rank_count import how_to_start, ranks_started
from megalite.monitor.console import announce, complain
from megalite.monitor.jsonl import read_metrics
from megalite.monitor.sinks import absent_packages
from megalite.planner.machine import memory_problems
from megalite.planner.memory_copies import copy_problems
from megalite.train.callbacks import Callback, named_callbacks
from megalite.train.interruption import (
    StopSignals,
    ignore_repeated_signals,
    signals_restored,
    stop_signals,
    tell_interruption,
    termination_raised,
)
from megalite.train.local_restarts import run_again
from megalite.train.meet_ranks import meet_ranks, tell_others
from megalite.train.run_folder import RunFolder
from megalite.train.start import start_lines
from megalite.train.time_budget import TimeBudget, time_budget

# The run says what is saved, and how to resume.
_TOLD = (STOPPED, NOT_BEGUN, TERMINATED)
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class TrainingResult:
    """Where a run stands, as its folder has it."""

    folder: Path

    @property
    def checkpoint(self) -> Path | None:
        """The last one, to go on from."""
        return find_latest(self.folder / "checkpoints")

    @property
    def best(self) -> Path | None:
        """The one with the lowest validation loss; None without checkpoint.best."""
        return find_best(self.folder / "checkpoints")

    @property
    def export(self) -> Path:
        """The Hugging Face folder, where checkpoint.export asks for one; rank 0 writes it."""
        return self.folder / "export"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, one dict a step."""
        return read_metrics(self.folder / "metrics.jsonl")


class Trainer:
    """Trains the run that a configuration describes, in the layout it asks for."""

    def __init__(
        self,
        config: RunConfig,
        *,
        callbacks: Sequence[Callback] = (),
        origins: Mapping[str, str] | None = None,
    ):
        """origins: those of LoadedRun, for the run's records."""
        self.config, self.callbacks, self.origins = config, tuple(callbacks), dict(origins or {})

    def train(self) -> TrainingResult:
        """Train to the end, going on from the last checkpoint as checkpoint.resume says.

        Raises MegaliteError: of the input before anything starts, RankFailure with the first cause among all ranks.
        Raises KeyboardInterrupt after Ctrl-C, and SystemExit after SIGTERM, once the run has saved a checkpoint.
        """
        with signals_restored():
            code = self.run("the configuration")
        if code:
            raise SystemExit(code)
        return TrainingResult(Path(self.config.run.folder))

    def run(self, source: str) -> int:
        """As `train`; the exit code of the job. `source`: where the user wrote the settings, for messages.

        A run that SIGINT (KeyboardInterrupt), SIGTERM, SIGUSR1 or SIGHUP ends says where it can be resumed. After all
        but SIGINT the code is 75 with a checkpoint of the last step, 76 before the end of the first step of this start,
        and 143 if the run could not save; they are ignored from then on, since batch systems repeat them.
        """
        _require_main_guard()
        started = time.monotonic()
        config, info = self.config, rank_info()
        try:
            with (
                termination_raised(info),
                stop_signals(config, info) if info is not None else nullcontext() as signals,
            ):
                code = self._run(info, source, signals, started)
                if code in _TOLD:
                    ignore_repeated_signals()
        except KeyboardInterrupt:
            tell_interruption(config, info)
            raise
        except Terminated:
            code = NOT_BEGUN
        if code in _TOLD:
            tell_interruption(config, info)
        return code

    def _run(self, info: RankInfo | None, source: str, signals: StopSignals | None, started: float) -> int:
        if info is not None and signals is not None:
            return self._run_launched(info, source, signals, started)
        config, folder = self.config, RunFolder(Path(self.config.run.folder))
        self._require(None, source)
        computed = "torch" in sys.modules
        threads = prepare_process(config.training.threads, local_ranks=config.layout.world_size)
        for line in start_lines(config, None, threads):
            announce(line)
        budget = time_budget(config, started, announce)

        # From here on torch may be imported: everything a user can get wrong in the file is known to be right.
        from megalite.train.inputs import prepare_inputs
        from megalite.train.rank import RankJob, train_rank

        prepare_deepspeed(config, None)
        require_kernels(config)
        method: Literal["fork", "spawn"] = "fork"
        apart = config.launch.restarts > 0
        if computed and (apart or config.layout.world_size > 1):
            method = self._start_method(threads)
        preload = ["torch", "megalite.train.rank"]
        if _needs_compiler(config):
            preload.append("torch._dynamo")  # here once for all ranks
        if config.zero_stage:
            preload.append("megalite.train.optimizer.deepspeed")
        callbacks = self._all_callbacks()
        with folder.claimed():
            prepare_inputs(config, folder)
            start = LocalStart(preload, method, config.hang_policy, complain, apart)

            def ranks(started: RunConfig) -> int:
                job = RankJob(started, threads, callbacks, budget, self.origins)
                return run_local_ranks(
                    train_rank, config.layout, folder.failures, arguments=(job,), start=start
                )

            return run_again(config, ranks, announce)

    def _run_launched(self, info: RankInfo, source: str, signals: StopSignals, started: float) -> int:
        """As `_run`, for one rank of a launcher: it meets the others first, so that any failure reaches all ranks."""
        config, failures = self.config, RunFolder(Path(self.config.run.folder)).failures
        try:
            _require_ranks(config, info, source)
        except ConfigError as error:
            tell_others(info, error)
            raise
        end = RankEnd(info, config.layout, failures, say=complain, shows_verdict=not watched_by_launcher())
        end.watch()
        end.info = info = with_master(
            info, interface=config.launch.interface, seconds=config.launch.rendezvous_seconds
        )
        threads = prepare_process(config.training.threads, info=info, interface=config.launch.interface)
        budget = TimeBudget()
        if info.rank == 0:
            for line in start_lines(config, info, threads):
                announce(line)
            budget = time_budget(config, started, announce)
        return run_rank(self._train_launched, end, arguments=(end, source, threads, budget, signals))

    def _train_launched(
        self,
        info: RankInfo,
        end: RankEnd,
        source: str,
        threads: int,
        budget: TimeBudget,
        signals: StopSignals,
    ) -> int:
        """Train as one rank of a launcher, among the others."""
        meeting = None
        if meets_others(info):
            meeting = meet_ranks(info, self.config, end)
            signals.on_end(end.stopping)
        self._require(info, source)

        from megalite.train.rank import RankJob, train_rank

        prepare_deepspeed(self.config, info)
        require_kernels(self.config)
        try:
            job = RankJob(self.config, threads, self._all_callbacks(), budget, self.origins)
            code = train_rank(info, job, signals, meeting)
        except KeyboardInterrupt:
            if meeting is not None:
                meeting.leave(INTERRUPTED)
            raise
        if meeting is not None and (verdict := meeting.leave(code)) is not None:
            raise JobEnded(verdict)
        return code

    def _all_callbacks(self) -> tuple[Callback, ...]:
        return (*self.callbacks, *named_callbacks(self.config.training.callbacks))

    def _require(self, info: RankInfo | None, source: str) -> None:
        """Raise MegaliteError for settings that this machine and this start cannot fulfil."""
        _require_ranks(self.config, info, source)
        _require_sinks(self.config, info, source)
        _require_checkpoint(self.config, info)
        ranks = self.config.layout.world_size if info is None else info.local_world_size
        older = reclaimable_bytes(RunFolder(Path(self.config.run.folder)).checkpoints)
        if too_large := [*memory_problems(self.config, ranks), *copy_problems(self.config, ranks, older)]:
            raise ConfigError(too_large, source)

    def _start_method(self, threads: int) -> Literal["fork", "spawn"]:
        """How to start ranks from this process, which has imported torch already.

        Raises LaunchError where neither way can work.
        """
        ranks = self.config.layout.world_size
        if threading.current_thread() is not threading.main_thread():
            wrong = "train() was not called in the main thread"
        elif _computes_after_fork(threads):
            return "fork"
        elif not (wrong := _why_not_spawned(self.callbacks)):
            return "spawn"
        script = Path(sys.argv[0]).name or "script.py"
        if ranks == 1:
            asked, remedy = "launch.restarts asks for a process of its own", "set launch.restarts = 0"
        else:
            asked, remedy = (
                f"the run asks for {ranks} ranks",
                f"use torchrun --nproc-per-node {ranks} {script}",
            )
        raise LaunchError(
            f"{asked}, which cannot be started from here: {wrong}; {remedy}, or train before anything is computed"
        )


def _needs_compiler(config: RunConfig) -> bool:
    """Return whether something of the run imports torch's compiler, as torch's own updates and recomputation do."""
    training, own_update = (
        config.training,
        config.optimizer.name == "adamw" and config.model.kernels != "reference",
    )
    return training.compile or training.recompute != "none" or config.zero_stage > 0 or not own_update


def _require_ranks(config: RunConfig, info: RankInfo | None, source: str) -> None:
    """ConfigError where the launcher started another number of ranks than the configuration was resolved for."""
    if info is not None and info.world_size != config.layout.world_size:
        ranks = config.layout.world_size
        message = (
            f"the layout has {ranks} rank{'s' * (ranks != 1)}, not the {ranks_started(info.world_size, info)}"
        )
        remedy = (
            f'call load_config in each rank with parallel.data = "auto", or {how_to_start([ranks], info)}'
        )
        raise ConfigError([Problem("parallel.data", message, remedy)], source)


def _require_sinks(config: RunConfig, info: RankInfo | None, source: str) -> None:
    """Raise ConfigError for a sink whose package rank 0 would lack."""
    if (info is None or info.rank == 0) and (problems := list(absent_packages(config.monitor.report_to))):
        raise ConfigError(problems, source)


def _require_checkpoint(config: RunConfig, info: RankInfo | None) -> None:
    """Raise CheckpointError for a checkpoint.resume that is no whole checkpoint, before anything is prepared.

    A run must not begin anew, either, in a folder of another program's checkpoints.
    """
    resume, command = config.checkpoint.resume, "import {} RUN"
    if resume == "never" or (info is not None and info.rank > 0):
        return
    if resume != "auto":
        require_not_foreign(Path(resume), "checkpoint.resume", command)
        find_checkpoint(Path(resume))
    elif find_latest((folder := Path(config.run.folder)) / "checkpoints") is None:
        require_not_foreign(folder, "run.folder", command)


def prepare_deepspeed(config: RunConfig, info: RankInfo | None) -> None:
    """Have this machine ready, or refuse, before the text is prepared and ranks wait for each other."""
    if not config.zero_stage:
        return
    settings = config.deepspeed_json()
    compiles = config.native_optimizer or "nvme" in offload_devices(settings["zero_optimization"]).values()
    if not compiles and config.training.precision != "fp16":
        return
    from megalite.train.optimizer.deepspeed_ops import build_operators, operators, require_precision

    require_precision(config.training.precision, settings)
    silent = info is not None and info.local_rank > 0
    needed = operators(settings, native=config.native_optimizer)
    build_operators(needed, (lambda _: None) if silent else announce)


def require_kernels(config: RunConfig) -> None:
    """ConfigError where compiled operators are asked for and there are none; each rank asks for its own device."""
    if config.model.kernels == "fused":
        from megalite.selftest.decide import choose_kernels

        # A GPU is not asked here: the question would start CUDA, which no fork survives.
        choose_kernels(config.model.kernels, "cpu")


def _require_main_guard() -> None:
    """LaunchError in a spawned rank that imports the user's script and meets the call that started it."""
    # multiprocessing's own mark of a process that is still importing the main module.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "a rank imports this script, which calls train() while it is imported; put the call under "
            'if __name__ == "__main__":'
        )


def _why_not_spawned(callbacks: Sequence[Callback]) -> str:
    """Why new Python processes could not have these callbacks; empty where they can."""
    computed = "this process has computed, or asked for a GPU, which does not survive a fork"
    main = sys.modules["__main__"]
    for callback in callbacks:
        name = type(callback).__qualname__
        try:
            ForkingPickler.dumps(callback)
        # Whatever a class of the user's raises.
        except Exception as error:
            return f"{computed}, and the callback {name} cannot be sent to a new process ({error})"
        if type(callback).__module__ == "__main__" and getattr(main, "__file__", None) is None:
            return f"{computed}, and a new process cannot import the callback {name} (move it to a file)"
    return ""


def _computes_after_fork(threads: int) -> bool:
    """Whether a forked process could compute: on several threads, which lack those of an OpenMP pool, and on a GPU,
    which CUDA refuses where this process has so much as asked whether there is one."""
    import torch

    receiver, sender = os.pipe()
    parent, done = os.getpid(), False
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)  # a notebook's kernel may be killed while the child hangs
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is None or not torch.get_device_module(accelerator)._is_in_bad_fork():
                torch.set_num_threads(threads)
                torch.rand(512, 512).mul_(2).sum()
                os.write(sender, b"done")
        finally:
            os._exit(0)  # whatever was raised: the child must not go on with the caller's script
    os.close(sender)  # so that a child that ends without a word is noticed at once
    try:
        done = bool(select.select([receiver], [], [], _PROBE_SECONDS)[0]) and os.read(receiver, 4) == b"done"
    finally:  # also after Ctrl-C
        if not done:
            with suppress(ProcessLookupError):
                os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(receiver)
    return done
