"""Let a job run for a time, through all faults, as its operator would: requeue it, set a damaged checkpoint aside."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megalite.checkpoint.folder import LATEST, published_checkpoints, published_name, require_whole
from megalite.errors import CheckpointError, LaunchError, RankFailure
from megalite.launcher.exit_codes import NOT_BEGUN, STOPPED, TERMINATED
from megalite.launcher.local import JobSignals
from megalite.verify.chaos.faults import SLOW_SECONDS, Fault
from megalite.verify.chaos.inject import FlippedBit, PulsedRank, drop_link, fill_disk, flip_checkpoint_bit
from megalite.verify.chaos.job import LaunchedJob
from megalite.verify.chaos.watch import JobWatch
from megalite.verify.chaos.weights import ask_for_flip, flipped

POLL_SECONDS = 0.05
# So many as never end a job.
_RESTARTS = 1_000_000
# A job that does not make a step for so long after a fault is ended, and started again.
STUCK_SECONDS = 300.0
_SAVE_SECONDS = 60.0
_FAILED_STARTS = 3
# In this time after the end of a rank the others may still publish; a restart takes longer.
_PUBLISH_SECONDS = 0.3
# A fault comes to a job that has made so many steps of its own: a hang is not looked for in the first ones.
_SETTLED_STEPS = 5


@dataclass(frozen=True)
class JobCommand:
    """How the job is started. flags: `--section.key value`. folder: run.folder. ranks: of its layout."""

    run_file: Path
    flags: tuple[str, ...]
    folder: Path
    ranks: int

    @property
    def words(self) -> list[str]:
        command = [sys.executable, "-m", "megalite", "train", str(self.run_file), *self.flags]
        return [*command, "--launch.restarts", str(_RESTARTS), "--run.folder", str(self.folder)]

    @property
    def log(self) -> Path:
        """The file of all that the job prints."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass
class InjectedFault:
    """A fault that was done. at: time.monotonic. step, attempt: the last ones before it.

    detail: the link or the bit. outcome: "" until it is known. by_hand: an operator had to act.
    """

    fault: Fault
    at: float
    step: int
    attempt: int
    detail: str = ""
    outcome: str = ""
    by_hand: bool = False
    until: float | None = None


@dataclass(frozen=True)
class Surroundings:
    """The environment of a job's processes, the signals to this process, and where lines are said.

    shrink: returns the command with fewer ranks; raises LaunchError where there is none.
    """

    environ: Mapping[str, str]
    signals: JobSignals
    say: Callable[[str], None]
    shrink: Callable[[JobCommand], JobCommand]


@dataclass
class DisturbedJob:
    """A job with its faults; without any, the calm job. seconds: from its first step on; then it saves and stops.

    until: stops it before, once true. check_every: steps between self-checks.
    """

    command: JobCommand
    around: Surroundings
    faults: Sequence[Fault] = ()
    seconds: float = math.inf
    seed: int = 0
    until: Callable[[JobWatch], bool] = lambda watch: False
    check_every: int = 0
    injected: list[InjectedFault] = field(default_factory=list)
    torn_loaded: list[str] = field(default_factory=list)
    interrupted: bool = False

    def run(self) -> None:
        """Run the job to its end. Raises RankFailure where it fails without a fault; no process of it is left."""
        self.watch = JobWatch(self.command.folder)
        self._due = list(self.faults)
        self._pending: InjectedFault | None = None
        self._slow: list[tuple[PulsedRank, InjectedFault]] = []
        self._bits: dict[Path, FlippedBit] = {}
        self._looked_at, self._told_at, self._kill_at = 0, math.inf, math.inf
        self._start()
        try:
            while not self._over():
                self.around.signals.wait(POLL_SECONDS)
        finally:
            self._end_slow(math.inf)
            self._job.kill()

    @property
    def left(self) -> list[Fault]:
        """The faults that were not done: the job came to its last step before, or was interrupted."""
        return self._due

    @property
    def elapsed(self) -> float:
        """Seconds since the first step began; 0 before."""
        began = next((attempt.up_from for attempt in self.watch.attempts if attempt.steps), None)
        return 0.0 if began is None else time.monotonic() - began

    def _start(self) -> None:
        self._job = LaunchedJob(self.command.words, self.around.environ, self.command.log)
        self.watch.begin(self.command.ranks)

    def _over(self) -> bool:
        """Look at the job once, and do what is due; return whether it has ended for good."""
        # Asked first: the lines before the end are then all there to be taken in.
        code = self._job.exit_code()
        self.watch.look(self._job)
        self._check_loaded()
        if code is not None:
            return self._ended(code)
        signals = self.around.signals
        if (signals.interrupts or signals.terminations) and not self.interrupted:
            self.interrupted = True
            self._stop()
        if time.monotonic() > self._kill_at or signals.interrupts > 1:
            self._job.kill()
        self._settle()
        self._end_slow(time.monotonic())
        running = len(self.watch.now.steps) >= _SETTLED_STEPS and self._pending is None and not self._stopping
        if running and self._due and self.elapsed >= self._due[0].at:
            # Also behind the end of the time, where recoveries took longer than the faults were apart.
            self._inject(self._due.pop(0))
        elif running and (self.elapsed > self.seconds or self.until(self.watch)):
            self._stop()
        return False

    @property
    def _stopping(self) -> bool:
        return self._told_at < math.inf

    def _stop(self) -> None:
        """Have the job save and end; kill it where it does not."""
        self._told_at = time.monotonic()
        self._kill_at = self._told_at + _SAVE_SECONDS
        self._job.send(signal.SIGTERM)

    def _ended(self, code: int) -> bool:
        """Return whether a job that has ended is over; start it again where an operator would."""
        if self._stopping or code == 0:
            return True
        fault, attempt = self._pending, self.watch.now
        if fault is None:
            lines = "\n  ".join(self.watch.last_lines)
            raise RankFailure(
                f"the job ended by itself with exit code {code}; its last lines:\n  {lines}", code
            )
        if fault.fault.kind == "shrink":
            self.command = self.around.shrink(self.command)
            fault.detail = f"{self.command.ranks} ranks are left"
        elif code not in (STOPPED, NOT_BEGUN, TERMINATED):
            # Another rank of the same kind: no restart would help.
            fault.by_hand = True
            for checkpoint, bit in self._bits.items():
                if bit.file.name in attempt.cause and bit.tensor in attempt.cause and checkpoint.is_dir():
                    checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}"))
                    fault.outcome = "refused, with file and tensor named"
                    if not published_checkpoints(checkpoint.parent):
                        (
                            checkpoint.parent / LATEST
                        ).unlink()  # as the run asks for where no other one is there
        failed = [each for each in self.watch.attempts[fault.attempt + 1 :] if not each.steps]
        if len(failed) > _FAILED_STARTS:
            raise RankFailure(
                f"{len(failed)} starts after a fault ({fault.fault.kind}) made no step: {attempt.cause}"
            )
        self._start()
        return False

    def _inject(self, fault: Fault) -> None:
        watch, attempt = self.watch, self.watch.now
        ranks = watch.processes
        rank = fault.rank % len(ranks)
        done = InjectedFault(
            replace(fault, rank=rank), time.monotonic(), attempt.steps[-1].step, len(watch.attempts) - 1
        )
        if fault.kind == "flip-checkpoint" and watch.newest_checkpoint is None:
            self._due.insert(0, fault)  # the first one is still to come
            return
        try:
            self._do(done, ranks)
        except (LaunchError, ProcessLookupError) as error:
            done.outcome, done.until = f"not done: {error}", done.at
        self.injected.append(done)
        if fault.kind != "slow" and not done.outcome:
            self._pending = done
        detail = f" ({done.detail or done.outcome})" if done.detail or done.outcome else ""
        self.around.say(f"{self.elapsed:7.1f} s  {fault.kind}: rank {rank}, after step {done.step}{detail}")

    def _do(self, done: InjectedFault, ranks: Sequence[int]) -> None:
        """Do a fault to the ranks."""
        fault, process = done.fault, ranks[done.fault.rank]
        match fault.kind:
            case "kill":
                os.kill(process, signal.SIGKILL)
            case "stop":
                os.kill(process, signal.SIGSTOP)
            case "preempt":
                self._job.send(signal.SIGTERM)
            case "shrink":
                self._job.kill()
            case "full-disk":
                fill_disk(ranks)
            case "drop-link":
                done.detail = drop_link(ranks, fault.rank)
            case "slow":
                done.detail, done.until = f"{fault.factor:g} times", done.at + SLOW_SECONDS
                self._slow.append((PulsedRank(process, fault.factor), done))
            case "flip-checkpoint":
                os.kill(process, signal.SIGKILL)
                time.sleep(_PUBLISH_SECONDS)
                newest = self.watch.newest_checkpoint
                assert newest is not None
                bit = flip_checkpoint_bit(newest, random.Random(f"{self.seed} {fault.at}"))
                self._bits[newest], done.detail = bit, str(bit)
            case "flip-parameter":
                ask_for_flip(self.command.folder, fault.rank, self.seed)

    def _settle(self) -> None:
        """Note how the fault that the job has not got over yet has come out, once it is known."""
        fault, now = self._pending, self.watch.now
        if fault is None:
            return
        # A self-check in the same step may have ended this attempt before anyone looked.
        done = flipped(self.command.folder) if fault.fault.kind == "flip-parameter" else None
        if done is not None:
            fault.step, fault.detail = done["step"], done["tensor"]
        if len(self.watch.attempts) - 1 > fault.attempt:
            if now.steps:
                fault.outcome = fault.outcome or "recovered"
        elif done is not None and now.steps[-1].step > done["step"] + 2 * max(1, self.check_every):
            fault.outcome = "not found"
        if not fault.outcome and time.monotonic() > fault.at + STUCK_SECONDS:
            fault.outcome, fault.by_hand = f"stuck for {STUCK_SECONDS:g} s, ended by hand", True
            self._job.kill()
            self._start()
        elif fault.outcome and (now.steps or fault.outcome == "not found"):
            self._pending = None
            back = f": steps again after {now.steps[0].at - fault.at:.1f} s, behind step {now.resumed}"
            again = back if len(self.watch.attempts) - 1 > fault.attempt else ""
            self.around.say(f"{self.elapsed:7.1f} s    {fault.outcome}{again}")

    def _check_loaded(self) -> None:
        """Require of each attempt that it went on from a whole checkpoint, and from none with a flipped bit."""
        for attempt in self.watch.attempts[self._looked_at :]:
            if attempt.loaded_at is None:
                continue
            self._looked_at = self.watch.attempts.index(attempt) + 1
            if attempt.resumed:
                checkpoint = self.command.folder / "checkpoints" / published_name(attempt.resumed)
                try:
                    require_whole(checkpoint)
                except CheckpointError as error:
                    self.torn_loaded.append(str(error))
                if checkpoint in self._bits:
                    self.torn_loaded.append(f"{self._bits[checkpoint]} was loaded")

    def _end_slow(self, now: float) -> None:
        for slow, fault in list(self._slow):
            assert fault.until is not None
            if now < fault.until and fault.attempt == len(self.watch.attempts) - 1:
                continue
            slow.end()
            self._slow.remove((slow, fault))
            seen = [step for step in self.watch.attempts[fault.attempt].steps if step.at >= fault.at]
            fault.until = min(fault.until, time.monotonic())
            named = any(step.slow_rank == fault.fault.rank for step in seen)
            fault.outcome = "named as slow" if named else "not named as slow"
