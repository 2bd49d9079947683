"""Trains a run's layout and one process side by side for a few steps, and certifies what was compared."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing import active_children, get_context
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

from megalite.config.sections.schema import RunConfig
from megalite.errors import MegaliteError, RankFailure
from megalite.launcher.local import ENDING, LocalStart, Worker, run_local_ranks
from megalite.launcher.process import die_with_parent, leave_closed_terminal
from megalite.launcher.rank.detect import local_rank_infos
from megalite.launcher.rank.environment import prepare_process
from megalite.monitor.preparation import PreparationConsole
from megalite.train.run import prepare_deepspeed, require_kernels
from megalite.verify.certificate import Certificate
from megalite.verify.drawn_text import with_drawn_text
from megalite.verify.scratch import full_scratch, scratch_error_of, scratch_explained
from megalite.verify.shrink import Shrunk, alone, shrunk, with_every_expert

T = TypeVar("T")
_NARROW = ("bf16", "fp16")


@dataclass(frozen=True)
class VerifyRequest:
    """How to verify a run. precision: "float64", where only wrong code departs, or "run", the run's own.

    full_size: keep the run's sizes, and its initial weights.
    """

    steps: int = 2
    precision: Literal["float64", "run"] = "float64"
    full_size: bool = False


@scratch_explained()
def verify(
    config: RunConfig,
    request: VerifyRequest = VerifyRequest(),
    *,
    worker: Worker | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Compare every tensor of the run's layout with one process, and return the certificate.

    config: a resolved run. worker: what the ranks of the layout run, `record_rank`; the one process always runs that.
    Call it from the main thread of a process that has not computed with torch. Raises MegaliteError as training does.
    """
    started = time.monotonic()
    small = shrunk(config, full_size=request.full_size)
    scratch = Path(tempfile.mkdtemp(prefix="megalite-verify-"))
    kept = ""
    try:
        certificate = Verifier(request, scratch, say).certified(config, small, worker)
        return replace(certificate, seconds=time.monotonic() - started)
    except RankFailure as failure:
        kept = "failures" if str(scratch) in str(failure) else ""
        raise
    finally:
        for each in scratch.iterdir():
            # The report that a failure names stays.
            if each.name != kept:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        if not kept:
            scratch.rmdir()


class Verifier:
    """Verifies runs of one model and text, which differ in their layout, in a folder of its own.

    The text is made once, and one process is trained once.
    """

    def __init__(self, request: VerifyRequest, scratch: Path, say: Callable[[str], None] = lambda _: None):
        self._request, self._scratch, self._say = request, scratch, say
        self._inputs: Any = None
        # Number type -> the run of one process, and its recording.
        self._alone: dict[str, tuple[RunConfig, Any]] = {}

    def certified(self, config: RunConfig, small: Shrunk, worker: Worker | None = None) -> Certificate:
        """Verify a run, made small, and certify it; as `verify`."""
        started, layout = time.monotonic(), config.layout
        threads = prepare_process(small.config.training.threads, local_ranks=layout.world_size)

        # From here on torch may be imported: the settings are known to be right.
        from megalite.verify.record import RecordJob, record_rank
        from megalite.verify.verdict import Recordings, judged

        precision = self._precision(config)
        narrow = precision in _NARROW
        if narrow:
            small = with_every_expert(small)
        trained = self._trained(small.config.in_precision(precision))
        prepare_deepspeed(trained, None)
        require_kernels(trained)
        self._inputs = self._inputs or apart(_inputs, trained, self._scratch)
        job = RecordJob(trained, self._inputs, self._scratch / "layout", self._request.steps, threads)
        shutil.rmtree(job.folder, ignore_errors=True)  # of the layout before
        job.folder.mkdir()
        self._say(f"training {layout.text} for {self._request.steps} steps in {precision}")
        if layout.world_size == 1:
            apart(worker or record_rank, *_single(self._scratch, job))
        else:
            preload = ["torch", "megalite.verify.record", "torch._dynamo"]
            if trained.zero_stage:
                preload.append("megalite.train.optimizer.deepspeed")
            train_ranks(
                worker or record_rank,
                self._scratch,
                job,
                LocalStart(preload, hangs=config.hang_policy, say=self._say),
            )
        one = self._one_process(alone(trained, micro_batches=narrow), job)
        exact = self._one_process(alone(trained).in_precision("fp64"), job) if narrow else None
        self._say("comparing")
        certificate = apart(
            judged, config, Recordings(job, one, exact), small.changes, self._request.full_size
        )
        return replace(certificate, seconds=time.monotonic() - started)

    def _one_process(self, config: RunConfig, like: Any) -> Any:
        """Return the recording of one process that trains `config`: that of a layout before, if it was the same."""
        from megalite.verify.record import record_rank

        precision = config.training.precision
        before, job = self._alone.get(precision, (None, None))
        if before != config:
            job = replace(like, config=config, folder=self._scratch / f"one-{precision}")
            shutil.rmtree(job.folder, ignore_errors=True)
            job.folder.mkdir()
            self._say(f"training one process in {precision}")
            apart(record_rank, *_single(self._scratch, job))
            self._alone[precision] = config, job
        return job

    def _precision(self, config: RunConfig) -> str:
        """Return the number type to train in: ZeRO 3 and DeepSpeed's compiled AdamW know no float64."""
        if self._request.precision == "float64":
            return "fp32" if config.native_optimizer or config.zero_stage == 3 else "fp64"
        return apart(_own_precision, config.training.precision)

    def _trained(self, config: RunConfig) -> RunConfig:
        """Return the run with drawn text, in a folder of its own, of which nothing is saved."""
        config = with_drawn_text(config, self._scratch)
        run = config.run.model_copy(update={"folder": str(self._scratch / "run")})
        monitor = config.monitor.model_copy(update={"report_to": ()})
        return config.model_copy(update={"run": run, "monitor": monitor})


def train_ranks(worker: Worker, scratch: Path, job: Any, start: LocalStart) -> None:
    """Run the ranks of a RecordJob. Raises KeyboardInterrupt where a signal ends them, RankFailure as training does.

    ScratchError where a rank could not write its records.
    """
    try:
        code = run_local_ranks(worker, job.config.layout, scratch / "failures", arguments=(job,), start=start)
    except RankFailure as failure:
        raise scratch_error_of(failure) or full_scratch(scratch) or failure from None
    if code:
        raise KeyboardInterrupt


@contextmanager
def ended_by_term() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and SIGHUP raise KeyboardInterrupt in the `with` block: scratch folders are removed then."""
    # nohup has SIGHUP ignored, which stays so.
    ours = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _leave:
                signal.signal(number, handler)


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return `work(*arguments)`, computed in a forked process: this one stays free to fork ranks.

    It ends with this process. Raises KeyboardInterrupt, also after SIGTERM, MegaliteError as `work` does, RankFailure
    where the process dies.
    """
    own: dict[str, Any] = {"initializer": die_with_parent, "initargs": (os.getpid(),)}
    try:
        with ended_by_term(), ProcessPoolExecutor(1, mp_context=get_context("fork"), **own) as process:
            try:
                result, refused = process.submit(_guarded, work, *arguments).result()
            except KeyboardInterrupt:
                # A signal to this process alone: the executor would wait for the end of the work.
                for child in active_children():
                    child.kill()
                raise
    except BrokenProcessPool as error:
        raise RankFailure("a process of the verification died, perhaps for want of memory") from error
    if refused is None:
        return result
    message, problems, exit_code = refused
    failure = MegaliteError(message)
    failure.problems, failure.exit_code = problems, exit_code
    raise scratch_error_of(failure) or failure


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # A shell may send SIGHUP twice: the clean-up behind the first one goes on, and the process ends.
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP:
        leave_closed_terminal()
    raise KeyboardInterrupt


def _guarded(work: Callable[..., T], *arguments: Any) -> tuple[Any, Any]:
    """Return a result, or what says an error that was raised on purpose; such errors are made of other arguments."""
    try:
        with scratch_explained():
            return work(*arguments), None
    except MegaliteError as error:
        return None, (str(error), error.problems, error.exit_code)


def _single(scratch: Path, job: Any) -> tuple[Any, Any]:
    [info] = local_rank_infos(1, scratch / f"meet-{job.folder.name}")
    return info, job


def _inputs(config: RunConfig, scratch: Path) -> Any:
    from megalite.convert.huggingface.files import local_folder
    from megalite.data.ensure import ensure_data
    from megalite.train.inputs import RunInputs

    if (weights := config.model.weights) is not None:
        weights = str(local_folder(weights))
    return RunInputs(ensure_data(config, scratch / "run", PreparationConsole(StringIO())), weights)


def _own_precision(asked: str) -> str:
    from megalite.parallel.device import local_device
    from megalite.train.step.precision import choose_precision

    return choose_precision(asked, local_device(0, 1)).name
