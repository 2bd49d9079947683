"""Code of the user's own in a run: hooks that see every step, add metrics, and may ask the run to end. No torch."""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, MegaliteError, Problem, TrainingError
from megalite.monitor.metrics import ValidationMetrics, is_own_metric

if TYPE_CHECKING:
    from torch import nn

    from megalite.config.sections.schema import RunConfig
    from megalite.train.step.state import StepReport, TrainerState
    from megalite.train.step.train_step import TrainStep

Metrics = Mapping[str, float]


class ActiveRun:
    """The run as a callback sees it, with the way to ask for its end; one on each rank."""

    def __init__(self, trainer: "TrainStep"):
        self._trainer = trainer
        self.asked_to_stop: str | None = None
        """Why some callback of this rank wants the run to end; None as long as none does."""

    @property
    def config(self) -> "RunConfig":
        return self._trainer.config

    @property
    def rank(self) -> int:
        return self._trainer.mesh.rank

    @property
    def state(self) -> "TrainerState":
        """Steps, samples and tokens so far, the best validation."""
        return self._trainer.state

    @property
    def total_steps(self) -> int:
        return self._trainer.total_steps

    @property
    def model(self) -> "nn.Module":
        """This rank's stage: its shards of the parameters, by their canonical names."""
        return self._trainer.stage

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this step, with a checkpoint; enough that one rank calls it."""
        self.asked_to_stop = reason


class Callback:
    """Derive from this and override what is needed. Every rank has its own copies and calls them alike.

    The metrics that a hook returns, name -> number, go to the console and every sink; those of rank 0
    count. A hook that raises ends the run.
    """

    def on_train_start(self, run: ActiveRun) -> None:
        """Before the first step of this process; `run.state` says where a resumed run goes on."""

    def on_step_end(self, run: ActiveRun, report: "StepReport") -> Metrics | None:
        """After every step's update."""

    def on_validation_end(self, run: ActiveRun, validation: ValidationMetrics) -> Metrics | None:
        """After every validation."""

    def on_checkpoint(self, run: ActiveRun, checkpoint: Path) -> None:
        """When a checkpoint was published."""

    def on_train_end(self, run: ActiveRun) -> None:
        """After the last step, when everything is saved but the export."""


def named_callbacks(names: Sequence[str]) -> tuple[Callback, ...]:
    """Return an instance of each class MODULE:CLASS of training.callbacks. Raises ConfigError for one that is none.

    The modules are those on Python's path and in the current folder.
    """
    callbacks, problems = [], []
    if names and "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m megalite` has it
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            if not (module and attribute):
                raise MegaliteError("it is not of the form MODULE:CLASS")
            kind = getattr(importlib.import_module(module), attribute)
            if not (isinstance(kind, type) and issubclass(kind, Callback)):
                raise MegaliteError(f"{attribute} is no class derived from megalite.Callback")
            callbacks.append(kind())
        except Exception as error:
            reason = str(error) if isinstance(error, MegaliteError) else f"{type(error).__name__}: {error}"
            wrong = f'"{name}" cannot be made: {reason}'
            remedy = "write MODULE:CLASS, of a module in this folder or on PYTHONPATH, whose class needs no arguments"
            problems.append(Problem("training.callbacks", wrong, remedy, value=list(names)))
    if problems:
        raise ConfigError(problems)
    return tuple(callbacks)


class Callbacks:
    """Calls the hooks of several callbacks, in their order, and joins what they return."""

    def __init__(self, callbacks: Sequence[Callback], run: ActiveRun):
        self._callbacks, self._run = tuple(callbacks), run

    def __len__(self) -> int:
        return len(self._callbacks)

    def train_start(self) -> None:
        self._call("on_train_start")

    def step_end(self, report: "StepReport") -> dict[str, float]:
        return self._call("on_step_end", report)

    def validation_end(self, validation: ValidationMetrics) -> dict[str, float]:
        return self._call("on_validation_end", validation)

    def checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def train_end(self) -> None:
        self._call("on_train_end")

    def _call(self, hook: str, *arguments: Any) -> dict[str, float]:
        collected: dict[str, float] = {}
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{hook}"
            returned = self._guarded(name, getattr(callback, hook), arguments)
            for key, value in _metrics(name, returned):
                if is_own_metric(key) or key in collected:
                    raise TrainingError(f"{name} returned the metric {key}, which exists already; rename it")
                collected[key] = value
        return collected

    def _guarded(self, name: str, hook: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return hook(self._run, *arguments)
        except MegaliteError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            failure = TrainingError(
                f"the callback {name} raised {type(error).__name__}: {error} ({place.filename}:{place.lineno}, "
                f"after step {self._run.state.step})"
            )
            # Not as its cause: a connection that user code lost must not be taken for that of a rank.
            failure.__context__ = error
        raise failure


def _metrics(name: str, returned: Any) -> Iterator[tuple[str, float]]:
    """Yield name and number of each metric that a hook returned. Raises TrainingError for anything else."""
    if returned is None:
        return
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise TrainingError(
            f"the callback {name} returned a value of type {kind}; return a dict of numbers, or nothing"
        )
    for key, value in returned.items():
        try:
            number = float(value)
        except Exception as error:
            kind = type(value).__name__
            raise TrainingError(
                f"the callback {name} returned a value of type {kind} as the metric {key} ({error}); return a number"
            ) from None
        yield str(key), number
