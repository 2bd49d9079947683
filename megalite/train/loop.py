"""A run from its first step to its last: steps, validations, checkpoints, callbacks, and the reasons to end."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.checkpoint.folder import published_name, remove_older, write_best
from megalite.monitor.metrics import ValidationMetrics
from megalite.train.callbacks import ActiveRun, Callback, Callbacks
from megalite.train.report import RunReporter
from megalite.train.trainer import StepReport, Trainer
from megalite.train.validation import HeldOutSet, validate


class TrainingLoop:
    """What a rank does between the start and the export; every rank of the mesh runs one alike."""

    def __init__(
        self,
        trainer: Trainer,
        held_out: Mapping[str, HeldOutSet],
        reporter: RunReporter,
        checkpoints: Path,
        *,
        callbacks: Sequence[Callback] = (),
        resumed_from: Path | None = None,
    ):
        """checkpoints: the folder they go to. resumed_from: what may not be deleted there."""
        self._trainer, self._held_out, self._reporter = trainer, held_out, reporter
        self._checkpoints, self._resumed_from = checkpoints, resumed_from
        self._run = ActiveRun(trainer)
        self._callbacks = Callbacks(callbacks, self._run)
        self._config = trainer.config
        # On any rank: under a launcher each has its own script.
        self._asks = bool(trainer.mesh.max_over_world(float(bool(callbacks))))
        self._stopped: str | None = None  # what all ranks agree on that a callback asked for
        self.saved = resumed_from
        """The last checkpoint."""

    def run(self) -> str:
        """Train until there is a reason to end; the reason, empty where it is the last step."""
        trainer = self._trainer
        self._point_to_best()
        self._callbacks.train_start()
        if self._held_out and self._config.validation.at_start and trainer.state.step == 0:
            validation = self._validate()
            self._reporter.start(validation, self._callbacks.validation_end(validation))
        while (reason := self._reason_to_end()) is None:
            self._step()
        self._callbacks.train_end()
        return reason

    def _step(self) -> None:
        report = self._trainer.train_step()
        step, validation = report.step, None
        metrics = self._callbacks.step_end(report)
        every = self._config.validation.every
        if self._held_out and every is not None and step % every == 0:
            validation = self._validated(metrics)
        last = self._ends_here()
        if self._held_out and last and validation is None:
            validation = self._validated(metrics)
        self._reporter.step(report, validation, metrics)
        self._save(report, validation, last=last)

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
        self.saved = self._trainer.save(self._checkpoints)
        self._point_to_best()
        if self._trainer.mesh.rank == 0 and settings.keep_last is not None:
            spared = () if self._resumed_from is None else (self._resumed_from,)
            remove_older(self._checkpoints, report.step, keep=settings.keep_last, spared=spared)
        self._callbacks.checkpoint(self.saved)

    def _point_to_best(self) -> None:
        """Also at the start: a run may have been killed before `best` named what it had just saved."""
        step = self._trainer.state.best_step
        if self._trainer.mesh.rank == 0 and self._config.checkpoint.best and step is not None:
            write_best(self._checkpoints, published_name(step))

    def _ends_here(self) -> bool:
        """Whether this step is the last one. Collective where there are callbacks: any of them may ask for it."""
        mesh, run = self._trainer.mesh, self._run
        if self._asks and mesh.max_over_world(float(run.asked_to_stop is not None)):
            asked = [each for each in mesh.gather_objects(run.asked_to_stop) or [] if each is not None]
            self._stopped = mesh.broadcast_object(asked[0] if asked else None)
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
