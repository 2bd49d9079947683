"""A run from its first step to its last: steps, validations, checkpoints, callbacks, and the reasons to end."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.sections.duration import epochs_of
from megalite.data.batches.stream_loader import StreamLoader
from megalite.errors import TrainingError
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.exit_codes import INTERRUPTED, STOPPED
from megalite.monitor.memory import empty_cache
from megalite.monitor.metrics import MEMORY_COPY, SELF_CHECK, SaveMetrics, ValidationMetrics
from megalite.train.callbacks import ActiveRun, Callback, Callbacks
from megalite.train.checkpoints.rollback import roll_back, rolls_back
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.interruption import NAMES, StopSignals
from megalite.train.report import RunReporter
from megalite.train.step.router_load import no_token
from megalite.train.step.self_check import cause, compare_copies
from megalite.train.step.state import StepReport
from megalite.train.step.train_step import TrainStep
from megalite.train.time_budget import TimeBudget
from megalite.train.validation import HeldOutSet, validate


@dataclass(frozen=True)
class StopConditions:
    """The reasons to end a run before its last step: signals to this rank, and the time that this start has."""

    signals: StopSignals
    budget: TimeBudget


class TrainingLoop:
    """Runs steps, validations, saves and callbacks until the run ends; every rank of the mesh runs one alike."""

    def __init__(
        self,
        trainer: TrainStep,
        held_out: Mapping[str, HeldOutSet],
        reporter: RunReporter,
        saver: RunSaver,
        *,
        callbacks: Sequence[Callback] = (),
        stops: StopConditions,
    ):
        self._trainer, self._held_out, self._reporter = trainer, held_out, reporter
        self._saver, self._signals, self._budget = saver, stops.signals, stops.budget
        self._copies = saver.copies
        self._run = ActiveRun(trainer)
        self._callbacks = Callbacks(callbacks, self._run)
        self._config = trainer.config
        # Why the run stops early: a callback's reason or the name of a signal, the same on every rank.
        self._stopped: str | None = None
        # Why the time was up, on rank 0, when the flags were last raised.
        self._late: str | None = None
        # Whether any rank has a callback: ranks may have different ones.
        self._asks = False
        self.exit_code = 0
        """75 if the run was stopped before its last step to be resumed, 130 by Ctrl-C; the same on every rank."""
        self.saved: Path | None = saver.resumed_from
        """The last published checkpoint, or the resumed one."""

    def run(self) -> str:
        """Train until there is a reason to end, and return it: empty after the last step."""
        trainer = self._trainer
        self._saver.point_to_best()
        [callbacks] = trainer.mesh.sum_over_world([float(len(self._callbacks))])
        self._asks = callbacks > 0
        self._callbacks.train_start()
        if self._held_out and self._config.validation.at_start and trainer.state.step == 0:
            validation = self._validate()
            assert validation is not None, "nothing cuts it short"
            self._reporter.start(validation, self._callbacks.validation_end(validation))
        self._reporter.begin(trainer.state.step)
        while (reason := self._reason_to_end()) is None:
            with self._reporter.traced(trainer.state.step + 1):
                self._step()
        if self._copies is not None and self._copies.unsaved:
            self._published(self._saver.save(at_once=True))
        self._callbacks.train_end()
        return reason

    def _step(self) -> None:
        report, validation = self._train_step(), None
        metrics = self._callbacks.step_end(report)
        # A callback may have asked for the end only now.
        due = self._validates_after(report.step)
        last = self._ends_here(self._flags_of_all(validates=due) if self._asks else report.flags)
        if self._held_out and (due or last) and not self.exit_code:
            validation = self._validated(metrics)
            last = self._ends_here(self._flags_of_all(validates=False))
        self._reporter.step(report, validation, metrics, writes=any(report.flags[:1]))  # the first flag: busy
        if dead := self._trainer.routers.newly_dead():
            self._reporter.warn(f"step {report.step}: {no_token(dead)}")
        self._save(report, validation, last=last)
        empty_every = self._config.training.empty_cache_every
        if empty_every and report.step % empty_every == 0:
            empty_cache(self._trainer.mesh.device)

    def _train_step(self) -> StepReport:
        self._budget.begin_step()
        try:
            with self._reporter.profiled(self._trainer.state.step + 1), self._reporter.measures.step():
                report = self._trainer.train_step(self._flags, self._saver.before_update)
        except TrainingError:
            # Every rank raises it, so all are here to publish the checkpoint in flight, which is collective.
            self._published(self._saver.finish())
            raise
        self._saver.stepped(report)
        self._budget.stepped(report.step_seconds)
        if rolls_back(self._trainer, report):
            # The checkpoint in flight is of a step before this one.
            self._published(self._saver.finish())
            with self._reporter.working("rolling back"):
                report = roll_back(self._trainer, self.saved, report)
        if self._copies is not None and self._copies.due(report.step):
            self._warn(self._copies.settle())
        return report

    def _validates_after(self, step: int) -> bool:
        return self._is_due(self._config.validation.every, step)

    def _validated(self, metrics: dict[str, float]) -> ValidationMetrics | None:
        """Validate, and add the metrics that callbacks return for it to `metrics`; None if a signal cuts it short."""
        validation = self._validate(self._signalled)
        if validation is not None:
            metrics |= self._callbacks.validation_end(validation)
        return validation

    def _validate(self, ends: Callable[[], bool] = lambda: False) -> ValidationMetrics | None:
        batches = sum(held_out.steps for held_out in self._held_out.values())
        with self._reporter.working("validating", "batches", batches) as work:
            validation = validate(self._trainer, self._held_out, ends, work.advance)
        progress.begin(Activity.BETWEEN_STEPS)
        if validation is not None:
            minimum = self._config.validation.minimum_improvement
            self._trainer.state = self._trainer.state.validated(validation.loss, minimum)
            self._budget.validated(validation.seconds)
        return validation

    def _signalled(self) -> bool:
        """Return whether any rank has a signal. Collective."""
        return self._trainer.mesh.sum_over_world([float(self._signals() is not None)])[0] > 0

    def _save(self, report: StepReport, validation: ValidationMetrics | None, *, last: bool) -> None:
        settings = self._config.checkpoint
        best = settings.best and validation is not None and self._trainer.state.best_step == report.step
        # A restart after a rollback goes on behind the samples that it passed over.
        saves = last or best or report.rolled_back_to is not None or self._saves_after(report.step)
        self._check_copies(report.step, saves=saves)
        if self._copies is not None and not last and self._copies.due(report.step):
            self._warn(self._copies.take(self._trainer))
            self._reporter.took(MEMORY_COPY, self._copies.stall_seconds())
        if not saves:
            return
        with self._reporter.working(f"saving step-{report.step:06}"):
            checkpoints = self._saver.save(at_once=last)
        progress.begin(Activity.BETWEEN_STEPS)  # a hang of a callback, or before the next forward, is no save
        self._published(checkpoints)

    def _warn(self, text: str) -> None:
        if text:
            self._reporter.warn(text)

    def _check_copies(self, step: int, *, saves: bool) -> None:
        """Compare the copies of all tensors where it is due: a checkpoint has none that differ."""
        every = self._config.monitor.self_check_every
        if not every or (step % every and not saves):
            return
        started = time.perf_counter()
        progress.begin(Activity.COMPARING)
        difference = compare_copies(self._trainer)
        if difference is not None:
            # The checkpoint in flight was compared before it was taken.
            self._published(self._saver.finish())
            if self._copies is not None:
                self._copies.drop()  # they were taken since the last comparison
            raise cause(difference, self._trainer, self.saved)
        progress.begin(Activity.BETWEEN_STEPS)
        self._reporter.took(SELF_CHECK, time.perf_counter() - started)

    def _published(self, checkpoints: Sequence[SaveMetrics]) -> None:
        for checkpoint in checkpoints:
            self.saved = checkpoint.path
            self._reporter.saved(checkpoint)
            self._callbacks.checkpoint(checkpoint.path)

    def _saves_after(self, step: int) -> bool:
        return self._is_due(self._config.checkpoint.every, step)

    def _is_due(self, every: int | str | None, step: int) -> bool:
        """Return whether `every` ends with a step: a number of steps, or epochs, which end within a step."""
        if not isinstance(every, str):
            return every is not None and step % every == 0
        state, loader = self._trainer.state, self._trainer.loader
        assert not isinstance(loader, StreamLoader), "a rule asks for steps"
        samples = state.samples + (step - state.step) * loader.global_batch_size
        interval = epochs_of(every) * loader.samples_per_epoch
        return samples // interval > (samples - loader.global_batch_size) // interval

    def _flags(self) -> tuple[bool, ...]:
        """Return this rank's reasons to end the run, and where its checkpoint in flight stands; called in a step."""
        step = self._trainer.state.step + 1
        return self._flags_after(step, validates=self._validates_after(step))

    def _flags_of_all(self, *, validates: bool) -> tuple[bool, ...]:
        """Return the flags that any rank raises between two steps. Collective.

        validates: a validation comes next, not a step.
        """
        flags = self._flags_after(self._trainer.state.step, validates=validates)
        totals = self._trainer.mesh.sum_over_world([float(each) for each in flags])
        return tuple(total > 0 for total in totals)

    def _flags_after(self, step: int, *, validates: bool) -> tuple[bool, ...]:
        arrived = self._signals()
        self._late = self._out_of_time(step, validates=validates)
        # Busy before failed: what fails between the two looks is seen.
        return (
            self._saver.busy,
            self._saver.failed,
            self._run.asked_to_stop is not None,
            self._late is not None,
            *(arrived is each for each in NAMES),
        )

    def _ends_here(self, flags: Sequence[bool]) -> bool:
        """Return whether this step is the last one, on any rank's signal or callback, or for want of time. Collective.

        The flags tell also whether all ranks have written the checkpoint in flight; then it is published.
        """
        mesh = self._trainer.mesh
        busy, failed, asked_any, late_any, *signals = flags
        self._signals.first_step_over()
        self._published(self._saver.advance(busy=busy, failed=failed))
        if asked_any:
            asked = [each for each in mesh.gather_objects(self._run.asked_to_stop) or [] if each is not None]
            self._stopped = mesh.broadcast_object(asked[0] if asked else None)
        number = next((each for each, came in zip(NAMES, signals, strict=True) if came), None)
        if number is not None and self._reason_to_end() is None:
            self._stopped = NAMES[number]
            self.exit_code = INTERRUPTED if number is signal.SIGINT else STOPPED
        elif late_any and self._reason_to_end() is None:
            self._stopped, self.exit_code = mesh.broadcast_object(self._late), STOPPED
        return self._reason_to_end() is not None

    def _out_of_time(self, step: int, *, validates: bool) -> str | None:
        """Return why the time is up, on rank 0, whose clock counts."""
        if self._trainer.mesh.rank > 0 or not self._budget.limited:
            return None
        save_seconds = self._saver.expected_seconds(another=self._saves_after(step))
        return self._budget.reason_to_stop(save_seconds=save_seconds, validates=validates)

    def _reason_to_end(self) -> str | None:
        """Return why the run ends: None if it goes on, empty after the last step."""
        state, settings = self._trainer.state, self._config.validation
        if state.step >= self._trainer.total_steps:
            return ""
        times = state.validations_without_improvement
        if settings.patience is None or times < settings.patience:
            return self._stopped
        by = f" by {settings.minimum_improvement:g} or more" if settings.minimum_improvement else ""
        lowest = "none was finite"
        if state.best_loss is not None:
            lowest = f"the lowest is {state.best_loss:.4f}, after step {state.best_step}"
        return (
            f"the validation loss has not improved{by} {times} times in a row (validation.patience); {lowest}"
        )
