"""A run from its first step to its last: steps, validations, checkpoints, callbacks, and the reasons to end."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megalite.errors import TrainingError
from megalite.monitor.metrics import SaveMetrics, ValidationMetrics
from megalite.train.callbacks import ActiveRun, Callback, Callbacks
from megalite.train.report import RunReporter
from megalite.train.saving import RunSaver
from megalite.train.state import StepReport
from megalite.train.step import TrainStep
from megalite.train.validation import HeldOutSet, validate


class TrainingLoop:
    """What a rank does between the start and the export; every rank of the mesh runs one alike."""

    def __init__(
        self,
        trainer: TrainStep,
        held_out: Mapping[str, HeldOutSet],
        reporter: RunReporter,
        saver: RunSaver,
        *,
        callbacks: Sequence[Callback] = (),
        told_to_end: Callable[[], bool] = lambda: False,
        saved: Path | None = None,
    ):
        """told_to_end: whether this rank was told to save and end. saved: what the run goes on from."""
        self._trainer, self._held_out, self._reporter = trainer, held_out, reporter
        self._saver, self._was_told_to_end = saver, told_to_end
        self._run = ActiveRun(trainer)
        self._callbacks = Callbacks(callbacks, self._run)
        self._config = trainer.config
        self._stopped: str | None = None  # what all ranks agree on that a callback asked for
        self.told_to_end = False
        """Whether the run was over for SIGTERM, on every rank alike."""
        self.saved = saved
        """The last checkpoint."""

    def run(self) -> str:
        """Train until there is a reason to end; the reason, empty where it is the last step."""
        trainer = self._trainer
        self._saver.point_to_best()
        self._callbacks.train_start()
        if self._held_out and self._config.validation.at_start and trainer.state.step == 0:
            validation = self._validate()
            self._reporter.start(validation, self._callbacks.validation_end(validation))
        while (reason := self._reason_to_end()) is None:
            self._step()
        self._callbacks.train_end()
        return reason

    def _step(self) -> None:
        report = self._train_step()
        step, validation = report.step, None
        metrics = self._callbacks.step_end(report)
        every = self._config.validation.every
        if self._held_out and every is not None and step % every == 0:
            validation = self._validated(metrics)
        last = self._ends_here()
        if self._held_out and last and validation is None and not self.told_to_end:
            validation = self._validated(metrics)
        self._reporter.step(report, validation, metrics)
        self._save(report, validation, last=last)

    def _train_step(self) -> StepReport:
        try:
            report = self._trainer.train_step()
        except TrainingError:
            # It is every rank's, so all are here to complete what was saved before.
            self._published(self._saver.finish())
            raise
        self._saver.stepped(report)
        return report

    def _validated(self, metrics: dict[str, float]) -> ValidationMetrics:
        """A validation, and in `metrics` what callbacks have to say of it."""
        validation = self._validate()
        metrics |= self._callbacks.validation_end(validation)
        return validation

    def _validate(self) -> ValidationMetrics:
        validation = validate(self._trainer, self._held_out)
        minimum = self._config.validation.minimum_improvement
        self._trainer.state = self._trainer.state.validated(validation.loss, minimum)
        return validation

    def _save(self, report: StepReport, validation: ValidationMetrics | None, *, last: bool) -> None:
        settings = self._config.checkpoint
        best = settings.best and validation is not None and self._trainer.state.best_step == report.step
        if not (last or best or (settings.every is not None and report.step % settings.every == 0)):
            return
        self._published(self._saver.save(at_once=last))

    def _published(self, checkpoints: Sequence[SaveMetrics]) -> None:
        for each in checkpoints:
            self.saved = each.path
            self._reporter.saved(each)
            self._callbacks.checkpoint(each.path)

    def _ends_here(self) -> bool:
        """Whether this step is the last one. Collective: any rank may have been told to end, any callback ask for it.

        Ranks also agree on how far they have written a checkpoint that is in flight.
        """
        mesh, run = self._trainer.mesh, self._run
        told, asks = self._was_told_to_end(), run.asked_to_stop is not None
        # Busy before failed: what fails between the two looks is seen.
        own = [float(each) for each in (self._saver.busy, self._saver.failed, told, asks)]
        busy, failed, told_any, asked_any = (total > 0 for total in mesh.sum_over_world(own))
        self._published(self._saver.advance(busy=busy, failed=failed))
        if asked_any:
            asked = [each for each in mesh.gather_objects(run.asked_to_stop) or [] if each is not None]
            self._stopped = mesh.broadcast_object(asked[0] if asked else None)
        if told_any and self._reason_to_end() is None:
            self.told_to_end, self._stopped = True, "SIGTERM"
        return self._reason_to_end() is not None

    def _reason_to_end(self) -> str | None:
        """None as long as there is none; empty after the last step."""
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
