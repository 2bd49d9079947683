"""The results of a study: a record of each run that outlives the command, the order by loss, and a CSV of it."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megalite.checkpoint.folder import published_checkpoints
from megalite.errors import ConfigError, Problem, named
from megalite.monitor.jsonl import read_metrics
from megalite.studies.run_pool import SAVED_CODES, EndedRun
from megalite.studies.study_runs import StudyRun

VALIDATION, TRAINING = "validation loss", "training loss, mean of the last 5 % of the steps"
_LAST_SHARE = 0.05


@dataclass(frozen=True)
class RunOutcome:
    """Where a run of a study stands.

    state: "finished", "failed", "stopped" or "waiting". loss: by VALIDATION where the run validates, else by TRAINING;
    None before the end, and where it is not finite. processor_seconds: of all starts.
    """

    name: str
    values: Mapping[str, str]
    settings_key: str
    state: str = "waiting"
    loss: float | None = None
    steps: int = 0
    tokens: int = 0
    processor_seconds: float = 0.0
    cause: str = ""


class StudyRecord:
    """The file that says of each run how it ended, so that a finished one is not run again."""

    def __init__(self, path: Path, runs: Sequence[StudyRun], measure: str):
        """Read the record. Raises ConfigError where a run of it had other settings."""
        self._path, self.measure = path, measure
        self.outcomes = {run.name: RunOutcome(run.name, run.values, run.settings_key) for run in runs}
        recorded = _recorded(path)
        changed = []
        for run in runs:
            outcome = recorded.get(run.name)
            if outcome is not None and outcome.settings_key != run.settings_key and run.folder.exists():
                changed.append(run.name)
            elif outcome is not None:
                self.outcomes[run.name] = replace(outcome, values=run.values)
            if outcome is None or outcome.settings_key == run.settings_key:
                self._look_at(run)
        if changed:
            message = f"{path.parent} has {changed[0]} with other settings or another text"
            if len(changed) > 1:
                message += f", and {len(changed) - 1} more"
            remedy = f"name another with --run.folder, or delete {path.parent}"
            raise ConfigError([Problem("run.folder", message, remedy)])
        # Runs of an earlier, larger study stay in the file, but not in this one's results.
        self._others = [outcome for name, outcome in recorded.items() if name not in self.outcomes]

    def is_finished(self, run: StudyRun) -> bool:
        return self.outcomes[run.name].state == "finished"

    def end(self, ended: EndedRun) -> RunOutcome:
        """Take in the end of a run, and write the file."""
        run, before = ended.run, self.outcomes[ended.run.name]
        state = "finished" if ended.exit_code == 0 else "failed"
        if ended.exit_code in SAVED_CODES:
            state = "stopped"
        seconds = before.processor_seconds + ended.processor_seconds
        outcome = replace(
            before, state=state, cause=ended.cause * (state == "failed"), processor_seconds=seconds
        )
        self.outcomes[run.name] = _measured(outcome, run, self.measure)
        self.write()
        return self.outcomes[run.name]

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        runs = [asdict(outcome) for outcome in [*self.by_loss(), *self._others]]
        return {"measure": self.measure, "runs": runs}

    def write(self, more: Mapping[str, Any] | None = None) -> None:
        """Write the record. more: further values of the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        with named(partial):
            partial.write_text(
                json.dumps({**self.document(), **(more or {})}, indent=2) + "\n",
                encoding="utf-8",
            )
        partial.replace(self._path)

    def by_loss(self) -> list[RunOutcome]:
        """Return the outcomes with the lowest loss first; those without one are the last."""
        return sorted(
            self.outcomes.values(), key=lambda outcome: math.inf if outcome.loss is None else outcome.loss
        )

    def _look_at(self, run: StudyRun) -> None:
        """Take in what the run folder says: a batch job may have trained it, or a user may have deleted it."""
        outcome = self.outcomes[run.name]
        if not (run.folder / "metrics.jsonl").exists():
            outcome = replace(outcome, state="waiting", loss=None, steps=0, tokens=0)
        elif outcome.state != "finished" and _has_all_steps(run):
            outcome = replace(outcome, state="finished", cause="")
        self.outcomes[run.name] = _measured(outcome, run, self.measure)


def measure_of(runs: Iterable[StudyRun]) -> str:
    """Return the loss by which the runs are compared: that of validation if all have one."""
    validated = all(run.config.data.validation or run.config.data.split for run in runs)
    return VALIDATION if validated else TRAINING


def loss_curve(folder: Path) -> list[tuple[float, float]]:
    """Return (step, training loss) of a run folder; empty before its first record."""
    with suppress(OSError):
        records = read_metrics(folder / "metrics.jsonl")
        return [(record["step"], record["loss"]) for record in records if _is_number(record.get("loss"))]
    return []


def outcomes_csv(outcomes: Sequence[RunOutcome], keys: Sequence[str]) -> str:
    """Return the outcomes as CSV, a column for each swept key."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys, "state", "loss", "steps", "tokens", "processor_seconds", "cause"])
    for outcome in outcomes:
        values = [outcome.values.get(key, "") for key in keys]
        loss = "" if outcome.loss is None else outcome.loss
        numbers = [outcome.steps, outcome.tokens, round(outcome.processor_seconds, 1)]
        writer.writerow([outcome.name, *values, outcome.state, loss, *numbers, outcome.cause])
    return text.getvalue()


def _recorded(path: Path) -> dict[str, RunOutcome]:
    """Return name -> outcome of a file. Raises ConfigError for a file of another content."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {run["name"]: RunOutcome(**run) for run in runs}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError) as error:
        problem = Problem(str(path), f"cannot be read as the record of a study ({error})", "move it away")
        raise ConfigError([problem], "the study") from error


def _measured(outcome: RunOutcome, run: StudyRun, measure: str) -> RunOutcome:
    records = []
    with suppress(OSError):
        records = read_metrics(run.folder / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    if not steps:
        return outcome
    loss: float | None = None
    if outcome.state == "finished" and measure == VALIDATION:
        loss = next((r["validation_loss"] for r in reversed(records) if "validation_loss" in r), None)
    elif outcome.state == "finished":
        last = [record["loss"] for record in steps[-max(1, round(_LAST_SHARE * len(steps))) :]]
        loss = fmean(last) if all(map(_is_number, last)) else None
    return replace(outcome, loss=loss, steps=int(steps[-1]["step"]), tokens=int(steps[-1].get("tokens", 0)))


def _has_all_steps(run: StudyRun) -> bool:
    """Whether the last step that the settings ask for is recorded and saved; False for a run of epochs."""
    steps = run.config.training.steps
    records = read_metrics(run.folder / "metrics.jsonl")
    return (
        bool(records)
        and records[-1]["step"] == steps
        and steps in published_checkpoints(run.folder / "checkpoints")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
